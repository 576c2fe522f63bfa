// The timeline's view: the time range that it shows, in milliseconds from the drawing's start.
"use strict";

function duration(ms) {
  const size = Math.abs(ms);
  if (size === 0) return "0 ms";
  for (const [scale, unit] of [[1e-6, "ns"], [1e-3, "µs"], [1, "ms"], [1e3, "s"]]) {
    if (size >= 999.5 * scale) continue;
    const value = ms / scale;
    const digits = unit === "ns" || Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2;
    return `${value.toFixed(digits)} ${unit}`;
  }
  return `${(ms / 6e4).toFixed(1)} min`;
}

const view = (() => {
  const [low, high] = page.bounds;
  const narrowest = 1e-3;
  const listeners = [];
  let range = null;
  let isScheduled = false;

  function open() {
    range = model("timeline").x_range;
    for (const property of [range.properties.start, range.properties.end]) property.change.connect(tell);
    tell();
  }

  // Notifies listeners at most once per frame.
  function tell() {
    if (isScheduled) return;
    isScheduled = true;
    requestAnimationFrame(() => {
      isScheduled = false;
      for (const listener of listeners) listener(range.start, range.end);
    });
  }

  function show(start, end) {
    const length = Math.min(Math.max(end - start, narrowest), high - low);
    const from = Math.min(Math.max((start + end - length) / 2, low), high - length);
    range.setv({start: from, end: from + length});
  }

  // Moves the view to a box that is not visible, and zooms if the box would be illegible.
  function bring(start, end) {
    const length = range.end - range.start;
    const legible = end - start >= 0.01 * length && end - start <= length;
    const inside = start >= range.start && end <= range.end;
    if (legible && inside) return;
    const wanted = legible ? length : Math.max(6 * (end - start), narrowest);
    show((start + end - wanted) / 2, (start + end + wanted) / 2);
  }

  function zoom(factor) {
    const middle = (range.start + range.end) / 2;
    const half = factor * (range.end - range.start) / 2;
    show(middle - half, middle + half);
  }

  function pan(share) {
    const by = share * (range.end - range.start);
    show(range.start + by, range.end + by);
  }

  function reset() {
    show(...page.view);
  }

  function step(index) {
    const [, start, end] = page.steps[index];
    const margin = 0.02 * (end - start);
    show(start - margin, end + margin);
  }

  // The step in the middle of the view, or the last one that began before it.
  function current() {
    const middle = (range.start + range.end) / 2;
    let last = 0;
    page.steps.forEach(([, start], index) => { if (start <= middle) last = index; });
    return last;
  }

  function neighbour(by) {
    step(Math.min(Math.max(current() + by, 0), page.steps.length - 1));
  }

  return {
    open, show, bring, zoom, pan, reset, step, neighbour,
    get start() { return range.start; },
    get end() { return range.end; },
    onChange(listener) { listeners.push(listener); },
  };
})();
