// Selects the ranks that the timeline shows: removes the rows of others and moves the rest up.
"use strict";

const ranks = (() => {
  const choice = document.getElementById("ranks");
  const whole = page.views[0];
  const place = new Map(whole.ranks.map((rank, index) => [rank, index]));
  const kept = new Map(); // the heights of everything while all ranks are shown
  let shown = new Set(whole.ranks);

  function open() {
    for (const [name, columns] of [["boxes", ["bottom", "top"]], ["pending", ["bottom", "top"]],
                                   ["band", ["bottom", "top"]], ["path", ["y"]]]) {
      const source = model(name).data_source;
      kept.set(source, columns.map((column) => [column, Float32Array.from(source.data[column])]));
    }
    choice.addEventListener("change", () => select(choice.selectedIndex));
  }

  function select(index) {
    const chosen = page.views[index];
    choice.selectedIndex = index;
    shown = new Set(chosen.ranks);
    const up = new Map(chosen.ranks.map((rank, slot) => [rank, page.pitch * (place.get(rank) - slot)]));
    for (const [source, columns] of kept) {
      const data = {...source.data};
      for (const [column, heights] of columns) {
        data[column] = heights.map((height, row) => height + (up.get(source.data.rank[row]) ?? NaN));
      }
      source.data = data;
    }
    const plot = model("timeline");
    const [start, end] = chosen.range;
    plot.left[0].ticker.ticks = chosen.labels.map(([height]) => height);
    plot.left[0].major_label_overrides = new Map(chosen.labels);
    plot.y_range.setv({bounds: null});
    plot.y_range.setv({start, end});
    plot.y_range.setv({bounds: [start, end]});
    plot.frame_height = chosen.height;
    model("boxes").glyph.line_width = {value: chosen.dense ? 0 : 0.5};
    model("path").glyph.line_width = {value: chosen.dense ? 2 : 3};
    model("path-halo").glyph.line_width = {value: chosen.dense ? 4 : 6};
    search.redraw();
  }

  function wholeHeight() {
    const [start, end] = page.views[choice.selectedIndex].range;
    model("timeline").y_range.setv({start, end});
  }

  // Makes a row visible: shows all ranks if it was removed, and all rows if it is out of sight.
  function reveal(rank, bottom) {
    if (!shown.has(rank)) select(0);
    const {start, end} = model("timeline").y_range;
    if (bottom < start || bottom > end) wholeHeight();
  }

  return {open, select, reveal, wholeHeight, height: (rank) => -page.pitch * page.views[choice.selectedIndex].ranks.indexOf(rank)};
})();
