// Dark mode for figures: canvases ignore style sheets, so light and dark colours are swapped in the models.
"use strict";

const theme = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const pairs = Object.entries(page.dark);
  const toDark = new Map(pairs);
  const toLight = new Map(pairs.map(([light, dimmed]) => [dimmed, light]));

  // Recolours a figure's JSON before it is drawn: every key that ends in "color", with a plain or a nested value.
  function inColours(value, isColour) {
    if (typeof value === "string") return isColour ? toDark.get(value) ?? value : value;
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) return value.map((item) => inColours(item, false));
    return Object.fromEntries(Object.entries(value).map(
      ([key, item]) => [key, inColours(item, /color$/.test(key) || (isColour && key === "value"))]));
  }

  async function embed(name) {
    const item = JSON.parse(document.getElementById(`${name}-data`).textContent);
    await Bokeh.embed.embed_item(dark.matches ? inColours(item, false) : item, name);
  }

  function exchange() {
    const exchanged = dark.matches ? toDark : toLight;
    for (const drawn of Bokeh.documents.flatMap((figures) => [...figures.all_models])) {
      for (const property of drawn) {
        if (!/color$/.test(property.attr)) continue;
        const value = property.get_value();
        const colour = exchanged.get(value?.value ?? value);
        if (colour === undefined) continue;
        drawn.setv({[property.attr]: typeof value === "string" ? colour : {...value, value: colour}});
      }
    }
  }

  dark.addEventListener("change", exchange);
  return {embed};
})();
