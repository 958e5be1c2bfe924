// Elements of the page. Texts are always set as text: nothing of a checkpoint is ever taken for HTML.

const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// A list of names and values.
function pairs(rows) {
  return make("dl", { class: "pairs" }, rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

function table(titles, rows) {
  return make("div", { class: "scrolls" }, make("table", {},
    make("thead", {}, make("tr", {}, titles.map((title) => make("th", {}, title)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map((cell) => make("td", {}, cell)))))));
}
