// Shows on the page what happened or went wrong.
import { byId, make } from "./dom.js";

const STAYS_MS = 9000, SHORT_MS = 4500;

function put(words, kind, key, time) {
  const host = byId("notices");
  if (key) dismiss(key);
  if ([...host.children].some((each) => each.firstChild.textContent === words)) return;
  const item = make("div", { class: `notice ${kind}`, role: kind === "bad" ? "alert" : "status", "data-key": key },
    make("span", {}, words), make("button", { type: "button", class: "mini", "aria-label": "Dismiss", onclick: () => item.remove() }, "×"));
  host.append(item);
  while (host.children.length > 3) host.firstChild.remove();
  if (!key) setTimeout(() => item.remove(), time);
}

/** A failure, with what to do about it; with a key it stays until `dismiss`. */
export const complain = (words, key) => put(words || "Something went wrong.", "bad", key, STAYS_MS);
export const notice = (words) => put(words, "good", undefined, SHORT_MS);
export function dismiss(key) { for (const each of byId("notices").querySelectorAll(`[data-key="${key}"]`)) each.remove(); }

/** Do something; a refusal is shown on the page and changes nothing. */
export async function attempt(work, report = complain) {
  try {
    return await work();
  } catch (error) {
    report(error.message || String(error));
    return undefined;
  }
}
