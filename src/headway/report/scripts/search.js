// Search: finds boxes by kind, name, rank or details, and fades all others.
"use strict";

const search = (() => {
  const field = document.getElementById("search");
  const summary = document.getElementById("found");
  let texts = null;
  let hits = [];
  let at = -1;

  const source = () => model("boxes").data_source;

  // Expands the tooltips' texts, which the page's tables hold once each.
  function open() {
    const {kind, name, detail, step} = page.tables;
    const data = source().data;
    const rows = Array.from(data.left.keys());
    source().data = {
      ...data,
      what: rows.map((row) => [kind[data.kind[row]], name[data.name[row]]].filter(Boolean).join(" · ")),
      took: rows.map((row) => duration(data.right[row] - data.left[row])),
      from: rows.map((row) => duration(data.left[row])),
      where: rows.map((row) => `rank ${data.rank[row]}, step ${step[data.step[row]]}`),
      more: rows.map((row) => detail[data.detail[row]]),
    };
    field.addEventListener("input", () => look(field.value));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") go(event.shiftKey ? -1 : 1);
      else if (event.key === "Escape") { clear(); field.blur(); }
      else return;
      event.preventDefault();
    });
    document.getElementById("hit-before").addEventListener("click", () => go(-1));
    document.getElementById("hit-after").addEventListener("click", () => go(1));
  }

  function matching(wanted) {
    const data = source().data;
    const rank = /^rank\s*(\d+)$/.exec(wanted); // exactly this rank, not those that begin with its digits
    texts ??= data.what.map((what, row) => `${what}\nrank ${data.rank[row]}\n${data.more[row]}`.toLowerCase());
    const rows = Array.from(data.left.keys());
    const chosen = rank ? rows.filter((row) => data.rank[row] === Number(rank[1]))
      : rows.filter((row) => texts[row].includes(wanted));
    return chosen.sort((a, b) => data.left[a] - data.left[b] || data.rank[a] - data.rank[b]);
  }

  function look(text) {
    const wanted = text.trim().toLowerCase();
    at = -1;
    hits = wanted ? matching(wanted) : [];
    // An empty selection shows all boxes, so the summary says that nothing matches.
    source().selected.indices = hits;
    tell(wanted !== "");
    redraw();
  }

  function tell(searching) {
    const many = hits.length.toLocaleString("en");
    summary.textContent = !searching ? "" : !hits.length ? "no hits" : at < 0 ? `${many} hit${hits.length > 1 ? "s" : ""}`
      : `${(at + 1).toLocaleString("en")} of ${many}`;
  }

  // Starts with the first hit in or after the view.
  function go(by) {
    if (!hits.length) return;
    const data = source().data;
    if (at >= 0) at = (at + by + hits.length) % hits.length;
    else at = Math.max(hits.findIndex((row) => data.right[row] > view.start), 0);
    const row = hits[at];
    ranks.reveal(data.rank[row], data.bottom[row]);
    view.bring(data.left[row], data.right[row]);
    tell(true);
    redraw();
  }

  // Frames the hit at the current position of its row.
  function redraw() {
    const data = source().data;
    const row = hits[at];
    const value = (column) => (row === undefined ? [] : [data[column][row]]);
    model("hit").data_source.data =
      {left: value("left"), right: value("right"), bottom: value("bottom"), top: value("top")};
  }

  function clear() {
    field.value = "";
    look("");
  }

  return {open, clear, redraw, focus() { field.focus(); field.select(); }};
})();
