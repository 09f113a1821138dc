// Build elements. All text from a model or a person becomes a text node, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: h("a", {class: "name", href, onclick: go}, "text", child, ...). A null or false child is left out. */
export function h(tag, properties = {}, ...children) {
  return dress(document.createElement(tag), properties, children);
}

/** The same for SVG elements. */
export function svg(tag, properties = {}, ...children) {
  return dress(document.createElementNS(SVG, tag), properties, children);
}

function dress(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

/** Append children. */
export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** Replace all children. */
export function fill(element, ...children) {
  element.replaceChildren();
  return add(element, children);
}

/** A button; `key` is shown beside its label. */
export function button(label, onclick, { key = null, kind = "", ...rest } = {}) {
  return h("button", { type: "button", class: kind, onclick, ...rest }, label, key && h("kbd", {}, key));
}

/** A labelled form control. */
export function field(label, control, help = null) {
  return h(
    "label",
    { class: "field" },
    h("span", { class: "field-name" }, label),
    control,
    help && h("small", {}, help),
  );
}

/** A <select> of [value, label] pairs. */
export function choose(options, chosen, onchange, properties = {}) {
  const list = options.map(([value, label]) =>
    h("option", { value, selected: String(value) === String(chosen) }, label),
  );
  return h("select", { ...properties, onchange: (event) => onchange(event.target.value) }, list);
}

/** Debounce: run only the last call within `delay` ms. */
export function debounced(delay, call) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), delay);
  };
}

/** Run at most once per frame. */
export function onceAFrame(call) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      call();
    });
  };
}

/** Save a blob as a file. */
export function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
