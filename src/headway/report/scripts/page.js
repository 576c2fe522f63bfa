// What all scripts of a page share: the values that it was made with, and the models of its figures by their names.
"use strict";

const page = JSON.parse(document.getElementById("page-data").textContent);

function model(name) {
  for (const one of Bokeh.documents) {
    const found = one.get_model_by_name(name);
    if (found !== null) return found;
  }
  throw new Error(`the page has no ${name}`);
}
