// Draws the figure of decisions. `data-ready` says that the page can be used.
"use strict";

(async () => {
  Bokeh.set_log_level("error");
  await theme.embed("decisions");
  document.documentElement.dataset.ready = "true";
})();
