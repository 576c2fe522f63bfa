// Draws both figures, then starts the other scripts. `data-ready` marks the page as ready to use.
"use strict";

(async () => {
  Bokeh.set_log_level("error");
  await theme.embed("timeline");
  await theme.embed("history");
  search.open();
  ranks.open();
  controls.open();
  view.open();
  document.documentElement.dataset.ready = "true";
})();
