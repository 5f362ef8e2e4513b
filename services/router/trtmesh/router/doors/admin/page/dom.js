// Elements made of text: nothing that a request, a model or a worker says is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// A table of rows with keys. A row keeps its elements while its key is there, and so the focus within.
// A column has a name, and a `text` of a row or a `draw` into the row's cell.
export class Rows {
  constructor(table, columns, key, empty) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    const heads = columns.map((each) =>
      element("th", { scope: "col", className: each.kind ?? "", textContent: each.name }));
    this.body = element("tbody");
    this.empty = element("p", { className: "empty", textContent: empty });
    table.append(element("thead", {}, element("tr", {}, ...heads)), this.body);
    table.after(this.empty);
    this.table = table;
  }

  show(rows) {
    const gone = new Map(this.rows);
    let place = this.body.firstChild;
    for (const row of rows) {
      const key = this.key(row);
      const line = this.rows.get(key) ?? this.#line(key);
      gone.delete(key);
      if (line !== place) this.body.insertBefore(line, place);
      else place = place.nextSibling;
      this.columns.forEach((column, at) => {
        const cell = line.children[at];
        if (column.draw) column.draw(cell, row);
        else put(cell, column.text(row));
      });
    }
    for (const [key, line] of gone) {
      line.remove();
      this.rows.delete(key);
    }
    this.table.hidden = !rows.length;
    this.empty.hidden = rows.length > 0;
  }

  #line(key) {
    const line = element("tr");
    this.columns.forEach((column, at) => {
      const cell = element(at ? "td" : "th", { className: column.kind ?? "" });
      if (!at) cell.scope = "row";
      cell.dataset.label = column.name;
      line.append(cell);
    });
    this.rows.set(key, line);
    return line;
  }
}

const SHAPES = { ready: "●", connecting: "◌", stalled: "▲", draining: "◐", lost: "✕", refused: "■", running: "●",
  waiting: "◌" };

// A state as a shape and a word.
export function drawState(cell, word) {
  if (!cell.firstChild) cell.append(element("div", {}, element("span", { ariaHidden: "true" }), element("span")));
  const [shape, told] = cell.firstChild.children;
  put(shape, SHAPES[word] ?? "○");
  put(told, word);
  cell.dataset.state = word;
}

export function drawBar(cell, used, total, text = total ? `${Math.round(100 * Math.min(1, used / total))}%` : "–") {
  if (!cell.firstChild) {
    const bar = svg("svg", { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" });
    bar.append(svg("rect", { class: "ground", width: 100, height: 6 }), svg("rect", { height: 6 }));
    cell.append(element("div", {}, element("span"), bar));
  }
  const share = total ? Math.min(1, used / total) : 0;
  const [told, bar] = cell.firstChild.children;
  put(told, text);
  bar.lastChild.setAttribute("width", 100 * share);
}

// A number over its course.
export function drawCourse(cell, text, values) {
  if (!cell.firstChild) {
    const line = svg("svg", { class: "course", viewBox: "0 0 60 16", preserveAspectRatio: "none", "aria-hidden": "true" });
    line.append(svg("polyline", { fill: "none" }));
    cell.append(element("div", {}, element("span"), line));
  }
  const [told, line] = cell.firstChild.children;
  put(told, text);
  const most = Math.max(1e-9, ...values);
  const points = values.map((value, at) => `${60 - values.length + at + 1},${(15 - 14 * (value / most)).toFixed(1)}`);
  line.firstChild.setAttribute("points", points.join(" "));
}

// A button that does something at once, or asks first.
export function action(label, act, asks = false) {
  const button = element("button", { type: "button", textContent: label });
  let asked = 0;
  button.addEventListener("click", async () => {
    if (asks && !asked) {
      button.textContent = `${label}: sure?`;
      asked = setTimeout(() => { asked = 0; button.textContent = label; }, 4000);
      return;
    }
    clearTimeout(asked);
    asked = 0;
    button.textContent = label;
    button.ariaDisabled = "true";
    try { await act(); } finally { button.ariaDisabled = null; }
  });
  return button;
}

export const whole = (value) => Math.round(value).toLocaleString("en");
export const seconds = (ms) => (ms < 99500 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 60000)} min`);
