// Draws both figures, then lets everything else begin. `data-ready` says that the page can be used.
"use strict";

(async () => {
  Bokeh.set_log_level("error");
  const item = (id) => JSON.parse(document.getElementById(id).textContent);
  await Bokeh.embed.embed_item(item("timeline-data"), "timeline");
  await Bokeh.embed.embed_item(item("history-data"), "history");
  search.open();
  ranks.open();
  controls.open();
  view.open();
  document.documentElement.dataset.ready = "true";
})();
