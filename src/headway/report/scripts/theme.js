// Figures in the reader's colours: canvases know no style sheet, so light colours are exchanged for dark ones and back.
"use strict";

const theme = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const pairs = Object.entries(page.dark);
  const toDark = new Map(pairs);
  const toLight = new Map(pairs.map(([light, other]) => [other, light]));

  // A figure's document before it is drawn: values of what is called a colour, as such or in an object of their own.
  function inColours(value, isColour) {
    if (typeof value === "string") return isColour ? toDark.get(value) ?? value : value;
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) return value.map((each) => inColours(each, false));
    return Object.fromEntries(Object.entries(value).map(
      ([key, each]) => [key, inColours(each, /color$/.test(key) || (isColour && key === "value"))]));
  }

  async function embed(name) {
    const item = JSON.parse(document.getElementById(`${name}-data`).textContent);
    await Bokeh.embed.embed_item(dark.matches ? inColours(item, false) : item, name);
  }

  function exchange() {
    const exchanged = dark.matches ? toDark : toLight;
    for (const one of Bokeh.documents.flatMap((each) => [...each.all_models])) {
      for (const property of one) {
        if (!/color$/.test(property.attr)) continue;
        const value = property.get_value();
        const other = exchanged.get(value?.value ?? value);
        if (other !== undefined) one.setv({[property.attr]: typeof value === "string" ? other : {...value, value: other}});
      }
    }
  }

  dark.addEventListener("change", exchange);
  return {embed};
})();
