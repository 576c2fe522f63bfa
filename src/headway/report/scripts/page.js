// Shared by all scripts of a page: its data, and a lookup of Bokeh models by name.
"use strict";

const page = JSON.parse(document.getElementById("page-data").textContent);

function model(name) {
  for (const figures of Bokeh.documents) {
    const match = figures.get_model_by_name(name);
    if (match !== null) return match;
  }
  throw new Error(`the page has no ${name}`);
}
