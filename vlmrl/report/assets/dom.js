// Build elements. All text enters the page as text: nothing here or elsewhere parses markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUN_COLORS = ["--blue", "--orange", "--green", "--red", "--purple", "--teal", "--pink", "--brown"];

/** Make an element. `attributes` are properties of it, `class`, or functions for events such as `onclick`. */
function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("aria-") || name === "for" || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Make an element of SVG. */
function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Text of a model or a file with its control characters and marks of writing direction made visible. */
function visible(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2028\u2029\u2060-\u2069\ufeff]/g, (char) => {
    const code = char.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return code === 0x7f ? "\u2421" : `\u27e8${code.toString(16).padStart(4, "0")}\u27e9`;
  });
}

/** A number with about three significant digits. */
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return String(+value.toPrecision(3));
}

function percent(value) {
  const shown = value * 100;
  return `${Math.abs(shown) < 10 && shown % 1 ? shown.toFixed(1) : Math.round(shown)} %`;
}

function seconds(value) {
  if (value < 90) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} d`;
}

/** An image of a run, which is a data URL of ours or missing. */
function picture(run, hash) {
  const url = run.images && run.images[hash];
  if (!url || !url.startsWith("data:image/webp;base64,")) return el("span", { class: "missing" }, "image not shown");
  const image = el("img", { src: url, alt: `image ${hash}`, loading: "lazy", decoding: "async", class: "picture" });
  image.onclick = () => enlarge(url, hash);
  return image;
}

/** Show an image in front of the page. */
function enlarge(url, name) {
  const dialog = el("dialog", { class: "large" }, el("img", { src: url, alt: `image ${name}` }));
  dialog.onclick = () => dialog.close();
  dialog.onclose = () => dialog.remove();
  document.body.append(dialog);
  dialog.showModal();
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function runColor(index) {
  return color(RUN_COLORS[index % RUN_COLORS.length]);
}

function card(title, ...children) {
  return el("section", { class: "card" }, title ? el("h2", {}, title) : null, ...children);
}

const folds = {};

/** Children under a title that opens and closes them. It stays as the reader left it when the page is drawn anew. */
function foldable(title, isOpen, name, summary, ...children) {
  const box = el("details", { class: name, open: folds[title] === undefined ? isOpen : folds[title] }, el("summary", {}, el("h2", {}, title), summary), ...children);
  box.ontoggle = () => {
    folds[title] = box.open;
  };
  return box;
}

/** Call `action` only when calls have stopped for a moment. */
function later(action, ms = 150) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), ms);
  };
}
