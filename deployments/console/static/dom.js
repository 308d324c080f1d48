// Elements from plain values. Text always becomes a text node: nothing here reads markup.

export function h(tag, props = {}, ...children) {
  const element = tag === "svg" || SVG.has(tag) ? document.createElementNS(SVG_NS, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "hidden") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

const SVG_NS = "http://www.w3.org/2000/svg";
const SVG = new Set(["g", "path", "line", "circle", "rect", "text", "polyline", "title"]);

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

let counter = 0;

export function newId(prefix) {
  counter += 1;
  return `${prefix}-${counter}`;
}

// What a screen reader is told: whole sentences at beginnings and ends, never every token.
export function announce(text) {
  const live = document.getElementById("live");
  live.textContent = "";
  // Two answers may end in one frame: both are told.
  waiting.push(text);
  if (waiting.length === 1) requestAnimationFrame(() => { live.textContent = waiting.splice(0).join(" "); });
}

const waiting = [];

// A button that does nothing now. Not `disabled`: that would take the keyboard's place from under whoever pressed it.
export function rest(button, resting) {
  button.setAttribute("aria-disabled", String(resting));
}

export function table(caption, head, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, cell)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, place) =>
        place === 0 ? h("th", { scope: "row" }, cell) : h("td", {}, cell)))))));
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return (value + 0).toLocaleString("en"); // never -0
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) { value /= 1024; place += 1; }
  return `${number(value)} ${units[place]}`;
}
