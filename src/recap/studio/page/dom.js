// Makes elements. Whatever comes from a server goes in as text, never as markup.
export const byId = (id) => document.getElementById(id);
export const clamp = (x, low, high) => Math.max(low, Math.min(high, x));

/** make("button", {class: "x", onclick: f}, "text", child): attributes, listeners, then text or elements. */
export function make(tag, attributes = {}, ...inside) {
  return fill(document.createElement(tag), attributes, inside);
}

export function svg(tag, attributes = {}, ...inside) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, inside);
}

function fill(element, attributes, inside) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...inside.filter((part) => part !== null && part !== undefined));
  return element;
}

/** A row of buttons of which one is pressed. */
export function choices(host, options, chosen, pick) {
  host.replaceChildren(...options.map(([value, label, title]) => make("button", {
    type: "button", title, "aria-pressed": String(value === chosen), onclick: () => pick(value),
  }, label)));
}

/** The options of a select; `chosen` is selected. */
export function options(select, values, chosen) {
  select.replaceChildren(...values.map(([value, label]) => make("option", { value, selected: value === chosen }, label)));
}

const SHAPES = { play: "M4 1l13 8-13 8z", pause: "M3 1h4v16H3zM11 1h4v16h-4z", wait: "M2 7h4v4H2zM7 7h4v4H7zM12 7h4v4h-4z" };
export const icon = (name) => svg("svg", { viewBox: "0 0 18 18", "aria-hidden": "true" }, svg("path", { d: SHAPES[name] }));

const ROLES = {
  sink: ["First picture", "the video's opening frame, always kept"],
  bank: ["Bank", "what was new when it first appeared"],
  cast: ["Cast", "subjects of other videos and what was pinned"],
  summary: ["Summary", "a digest of the past"],
  prior: ["Recent", "the frames just before"],
  current: ["Now", "the frames being generated"],
};
/** Roles in the order in which a window has them, so that colours do not change places. */
export const inOrder = (roles) => { const names = Object.keys(ROLES); return [...roles].sort((a, b) => names.indexOf(a) - names.indexOf(b)); };
export const roleName = (role) => ROLES[role]?.[0] ?? role;
export const roleWords = (role) => ROLES[role]?.[1] ?? "";
export const roleColour = (role) => `var(--${role in ROLES ? role : "summary"})`;
