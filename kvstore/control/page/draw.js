// Small things that draw: elements, numbers as people read them, and the three kinds of chart. No state.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `children` are nodes or text; text is never read as markup. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") for (const [property, to] of Object.entries(value)) node.style.setProperty(property, to);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value) {
  let at = 0;
  while (Math.abs(value) >= 1000 && at < UNITS.length - 1) { value /= 1024; at += 1; }
  return `${at && value < 100 ? value.toPrecision(value < 10 ? 2 : 3) : Math.round(value)}\u00a0${UNITS[at]}`; // unit and number stay together
}

export const rate = (value) => (value === null || value === undefined ? "–" : value < 1 ? "idle" : `${bytes(value)}/s`);

export function count(value) {
  if (value < 0) return "?";
  if (value < 10000) return String(Math.round(value * 10) / 10);
  if (value < 999500) return `${(value / 1e3).toFixed(value < 99950 ? 1 : 0)}\u00a0k`;
  return `${(value / 1e6).toFixed(value < 9.995e7 ? 1 : 0)}\u00a0M`;
}

/** One or many, as words: plural(1, "record") is "1 record". */
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const said = (number, unit) => `${number}\u00a0${unit}`;
  if (value < 1e-3) return said(Math.round(value * 1e6), "µs");
  if (value < 1) return said((value * 1e3).toPrecision(value < 0.01 ? 2 : 3), "ms");
  if (value < 100) return said(value < 10 ? value.toFixed(1) : Math.round(value), "s");
  if (value < 5400) return said(Math.round(value / 60), "min");
  if (value < 172800) return said((value / 3600).toFixed(1), "h");
  return said(Math.round(value / 86400), "d");
}

export const percent = (part) => `${part >= 0.9995 || part === 0 ? Math.round(part * 100) : (part * 100).toFixed(part < 0.1 || part > 0.9 ? 1 : 0)}\u00a0%`;

export const clock = (epoch) => new Date(epoch * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

/** A path through the points that are there: a null in `values` is a gap, not a zero. */
function line(values, x, y) {
  let path = "", drawing = false;
  values.forEach((value, i) => {
    if (value === null) { drawing = false; return; }
    path += `${drawing ? "L" : "M"}${x(i).toFixed(2)} ${y(value).toFixed(2)}`;
    drawing = true;
  });
  return path;
}

/** The same, closed down to `floor`, run by run. */
function area(values, x, y, floor) {
  let path = "", start = null;
  values.forEach((value, i) => {
    if (value !== null) {
      path += `${start === null ? `M${x(i).toFixed(2)} ${floor}L` : "L"}${x(i).toFixed(2)} ${y(value).toFixed(2)}`;
      start ??= i;
    }
    if (start !== null && (value === null || i === values.length - 1)) {
      path += `L${x(value === null ? i - 1 : i).toFixed(2)} ${floor}Z`;
      start = null;
    }
  });
  return path;
}

/** Points that stand alone, which a line does not show. */
const alone = (values) => values.flatMap((value, i) =>
  value !== null && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null ? [i] : []);

export function sparkline(node, values) {
  const known = values.filter((value) => value !== null), most = Math.max(...known, 0) || 1;
  const x = (i) => (100 * i) / Math.max(values.length - 1, 1), y = (value) => 29 - (27 * value) / most;
  node.setAttribute("viewBox", "0 0 100 30");
  node.setAttribute("preserveAspectRatio", "none");
  node.replaceChildren(svg("path", { class: "a", d: area(values, x, y, 30) }), svg("path", { class: "l", d: line(values, x, y) }),
    ...alone(values).map((i) => svg("rect", { x: x(i) - 0.4, y: y(values[i]), width: 0.8, height: 30 - y(values[i]) })));
}

/** The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `value`. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= value * 0.999999);
}

/**
 * A chart of one value a minute.
 * @param node its box; drawn anew as large as the box is.
 * @param kind "line" (null: a gap) or "bars".
 * @param values one a minute, the last one now; null: nothing to say.
 * @param options start: seconds since the epoch of the first minute; top: of the axis, else as needed; format: of the
 *   axis; say(i): what the tip says; tip: where it says it; label: for who cannot see it; tone: a colour.
 */
export function minutes(node, kind, values, { start, top, format, say, tip, label, tone }) {
  const width = node.clientWidth || 600, height = node.clientHeight || 170;
  const box = { left: 46, right: 8, top: 8, bottom: 22 }, floor = height - box.bottom;
  const most = top ?? roundUp(Math.max(...values.map((value) => value ?? 0), 1e-6));
  const step = (width - box.left - box.right) / values.length;
  const x = (i) => box.left + step * (i + 0.5), y = (value) => floor - ((floor - box.top) * value) / most;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  root.style.setProperty("--tone", tone);
  for (const part of [0, 0.5, 1]) {
    root.append(svg("line", { class: "grid", x1: box.left, x2: width - box.right, y1: y(most * part), y2: y(most * part) }),
      svg("text", { x: box.left - 8, y: y(most * part) + 4, "text-anchor": "end" }, format(most * part)));
  }
  for (const ago of width < 420 ? [60, 30, 0] : [60, 45, 30, 15, 0]) {
    const i = values.length - 1 - ago + (ago === 60 ? 1 : 0);
    if (i >= 0) root.append(svg("text", { x: x(i), y: height - 5, "text-anchor": ago === 60 ? "start" : ago ? "middle" : "end" }, clock(start + 60 * i)));
  }
  if (kind === "bars") {
    values.forEach((value, i) => value && root.append(svg("rect", { class: "bar", x: x(i) - step * 0.36, width: step * 0.72, y: y(value), height: Math.max(floor - y(value), 1), rx: Math.min(2, step / 4) })));
  } else {
    root.append(svg("path", { class: "a", d: area(values, x, y, floor) }), svg("path", { class: "l", d: line(values, x, y) }),
      ...alone(values).map((i) => svg("circle", { class: "dot", cx: x(i), cy: y(values[i]), r: 2.5 })));
  }
  const cursor = svg("line", { class: "cursor", y1: box.top, y2: floor, visibility: "hidden" });
  root.append(cursor);
  root.addEventListener("pointermove", (event) => {
    const i = Math.floor((event.clientX - root.getBoundingClientRect().left - box.left) / step);
    const on = i >= 0 && i < values.length;
    cursor.setAttribute("visibility", on ? "visible" : "hidden");
    if (on) { cursor.setAttribute("x1", x(i)); cursor.setAttribute("x2", x(i)); }
    tip.textContent = on ? `${clock(start + 60 * i)}: ${say(i)}` : "";
  });
  root.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); tip.textContent = ""; });
  node.replaceChildren(root);
}

/** A bar of parts with its legend. `parts`: {name, value, tone, said}. */
export function stack(node, parts, label) {
  node.replaceChildren(
    el("div", { class: "stack", role: "img", "aria-label": `${label}: ${parts.map((part) => `${part.name} ${part.said}`).join(", ")}` },
      ...parts.filter((part) => part.value > 0).map((part) => el("i", { style: { flex: `${part.value} 1 0`, "--tone": part.tone } }))),
    el("div", { class: "legend small" }, ...parts.map((part) => el("span", { style: { "--tone": part.tone } }, el("b", {}, part.name), ` ${part.said}`))));
}

/** A table. `columns`: {title, cell(row), num, wide}; wide ones are left out on a phone. */
export function table(columns, rows) {
  const kind = (column) => [column.num ? "num" : "", column.wide ? "wide" : ""].join(" ").trim() || null;
  return el("table", {},
    el("thead", {}, el("tr", {}, ...columns.map((column) => el("th", { class: kind(column), scope: "col" }, column.title)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...columns.map((column) => el("td", { class: kind(column) }, column.cell(row)))))));
}

export const meter = (part, tone) => el("div", { class: "track" }, el("i", { style: { width: `${Math.max(0, Math.min(1, part)) * 100}%`, ...(tone ? { "--tone": tone } : {}) } }));
