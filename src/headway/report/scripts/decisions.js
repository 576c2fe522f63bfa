// Draws the figure of decisions. `data-ready` marks the page as ready to use.
"use strict";

(async () => {
  Bokeh.set_log_level("error");
  await theme.embed("decisions");
  document.documentElement.dataset.ready = "true";
})();
