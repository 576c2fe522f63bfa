// Keys, buttons, table rows and history bars that move the timeline's view.
"use strict";

const controls = (() => {
  const help = document.getElementById("help");
  const pathShown = document.getElementById("path-shown");
  const section = document.getElementById("timeline-section");

  const actions = {
    left: () => view.pan(-0.25),
    right: () => view.pan(0.25),
    in: () => view.zoom(0.7),
    out: () => view.zoom(1 / 0.7),
    reset: () => { view.reset(); ranks.wholeHeight(); },
    next: () => view.neighbour(1),
    previous: () => view.neighbour(-1),
    path: () => { pathShown.checked = !pathShown.checked; showPath(); },
    search: () => { section.scrollIntoView({block: "nearest"}); search.focus(); },
    help: () => (help.open ? help.close() : help.showModal()),
  };
  const keys = {
    arrowleft: "left", a: "left", arrowright: "right", d: "right", w: "in", "+": "in", "=": "in", s: "out", "-": "out",
    "0": "reset", home: "reset", n: "next", p: "previous", c: "path", "/": "search", "?": "help",
  };

  function showPath() {
    for (const name of ["path", "path-halo"]) model(name).visible = pathShown.checked;
  }

  function typing(event) {
    const target = event.composedPath()[0];
    return target instanceof HTMLElement && (target.isContentEditable || /^(input|select|textarea)$/i.test(target.tagName)
      && target.type !== "checkbox");
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || typing(event)) return;
    const action = keys[event.key.toLowerCase()];
    if (event.key === "Escape" && !help.open) search.clear();
    if (action === undefined || (help.open && action !== "help")) return;
    event.preventDefault();
    actions[action]();
  }

  // Scrolls to the timeline, for requests from elsewhere on the page.
  function lookAt(start, end) {
    view.show(start, end);
    document.getElementById("timeline").scrollIntoView({block: "nearest"});
  }

  function lookAtPiece(index) {
    const [rank, , start, end] = page.path[index];
    pathShown.checked = true;
    showPath();
    ranks.reveal(rank, ranks.height(rank));
    lookAt(start - 0.5 * (end - start), end + 0.5 * (end - start));
  }

  function lookAtStep(label, drawn) {
    const status = document.getElementById("history-told");
    const {steps} = page;
    if (drawn < 0) {
      status.textContent = `Step ${label} is not drawn in the timeline; steps ${steps[0][0]} to ${steps.at(-1)[0]} are.`;
      return;
    }
    status.textContent = `The timeline shows step ${label}.`;
    view.step(drawn);
    document.getElementById("timeline").scrollIntoView({block: "nearest"});
  }

  // Tab stops once per table; arrow keys move between rows.
  function rowsOf(table, act) {
    const rows = Array.from(table.tBodies[0].rows);
    const rowOf = (event) => rows.indexOf(event.target.closest("tr"));
    rows.forEach((row, index) => { row.tabIndex = index ? -1 : 0; });
    const actOn = (index) => act(Number(rows[index].dataset.piece));
    table.addEventListener("click", (event) => { if (rowOf(event) >= 0) actOn(rowOf(event)); });
    table.addEventListener("keydown", (event) => {
      const index = rowOf(event);
      const by = {ArrowDown: 1, ArrowUp: -1}[event.key] ?? 0;
      if (index < 0 || (by === 0 && event.key !== "Enter" && event.key !== " ")) return;
      event.preventDefault();
      if (by === 0) { actOn(index); return; }
      const next = rows[Math.min(Math.max(index + by, 0), rows.length - 1)];
      rows[index].tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
  }

  function tellView(start, end) {
    const slack = 0.03 * (end - start); // ignores neighbouring steps that show only in the margin
    const first = page.steps.findIndex(([, , to]) => to > start + slack);
    const last = page.steps.findLastIndex(([, from]) => from < end - slack);
    const steps = first < 0 || last < first ? "" : first === last ? `step ${page.steps[first][0]}, `
      : `steps ${page.steps[first][0]} to ${page.steps[last][0]}, `;
    document.getElementById("shown").textContent = `${steps}${duration(end - start)} wide`;
    const bars = page.bars.flatMap(([, , low, high], bar) => (steps && low <= last && high > first && low < high ? [bar] : []));
    const frame = model("history-view");
    frame.visible = bars.length > 0;
    if (bars.length) frame.setv({left: bars[0] - 0.5, right: bars.at(-1) + 0.5});
  }

  // Shows as many of the overview's numbers as fit.
  function thinOut() {
    const source = model("overview-labels").data_source;
    const wide = document.getElementById("timeline").clientWidth - 104;
    const every = Math.max(Math.ceil((36 * source.get_length()) / Math.max(wide, 1)), 1);
    source.data = Object.fromEntries(Object.entries(source.data).map(
      ([name, column]) => [name, Array.from(column).filter((_, at) => at % every === 0)]));
  }

  // Labels ticks in one unit, with enough digits to distinguish them.
  function labelTicks(axis) {
    axis.axis_label = "time on rank 0's clock, from the first drawn step";
    axis.formatter.doFormat = (ticks) => {
      const largest = Math.max(...ticks.map(Math.abs), 0);
      const [factor, unit] = largest >= 1e4 ? [1e-3, "s"] : largest >= 1 || !largest ? [1, "ms"] : [1e3, "µs"];
      const apart = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) * factor : 1;
      const digits = Math.min(Math.max(Math.ceil(-Math.log10(apart) - 1e-9), 0), 9);
      return ticks.map((tick) => `${(tick * factor).toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits})} ${unit}`);
    };
  }

  function open() {
    document.addEventListener("keydown", onKey);
    for (const button of document.querySelectorAll("button[data-action]")) {
      button.addEventListener("click", () => actions[button.dataset.action]());
    }
    for (const button of document.querySelectorAll("button[data-step]")) {
      button.addEventListener("click", () => lookAtStep(button.dataset.step, Number(button.dataset.drawn)));
    }
    for (const button of document.querySelectorAll("button[data-view]")) {
      button.addEventListener("click", () => {
        ranks.select(Number(button.dataset.view));
        section.scrollIntoView({block: "nearest"});
      });
    }
    pathShown.addEventListener("change", showPath);
    help.addEventListener("click", (event) => { if (event.target === help) help.close(); });
    rowsOf(document.getElementById("path"), lookAtPiece);
    model("history").on_event("tap", (event) => {
      const bar = Math.round(event.x);
      if (bar >= 0 && bar < page.bars.length) lookAtStep(...page.bars[bar]);
    });
    thinOut();
    labelTicks(model("timeline").below[0]);
    view.onChange(tellView);
  }

  return {open};
})();
