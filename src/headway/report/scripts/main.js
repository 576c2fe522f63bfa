// Draws both figures, then lets everything else begin. `data-ready` says that the page can be used.
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
