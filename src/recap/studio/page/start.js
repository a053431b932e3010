// The first view: begin a session, or go on with one.
import { byId, make, options } from "./dom.js";
import { request } from "./net.js";
import { attempt } from "./notices.js";

const open = (id) => { location.hash = `session=${encodeURIComponent(id)}`; };
let ready = false;

export async function showStart(about) {
  if (!ready) {
    ready = true;
    options(byId("memory"), about.memories.map((name) => [name, name]), "recap");
    options(byId("second-memory"), [["", "nothing"], ...about.memories.map((name) => [name, name])], "");
    options(byId("admission-first"), [["auto", "the memory's own"], ...about.admissions.map((name) => [name, name])], "auto");
    byId("model-words").textContent = /embedded/.test(about.backbone)
      ? "The small model knows 24 actors (fox, bus, cat, boat, robot, ...), 8 scenes (beach, forest, city, ...) and day, evening, night."
      : `Model: ${about.backbone}.`;
    byId("create").addEventListener("submit", (event) => { event.preventDefault(); create(); });
    byId("see-demo").addEventListener("click", () => { location.hash = "demo"; });
    byId("upload").addEventListener("change", () => upload());
  }
  const [found, casts] = await Promise.all([attempt(() => request("/sessions")), attempt(() => request("/casts"))]);
  listSessions(found?.sessions ?? found ?? [], about);
  listCasts(casts?.casts ?? []);
}

async function create() {
  const button = byId("create").querySelector(".primary");
  button.disabled = true;
  button.textContent = "Starting";
  const body = {
    prompt: byId("first-prompt").value.trim(), seed: +byId("seed").value, memory: byId("memory").value, second_memory: byId("second-memory").value,
    admission: byId("admission-first").value, cast: [...byId("first-cast").querySelectorAll("input:checked")].map((each) => each.value),
  };
  const made = await attempt(() => request("/sessions", { method: "POST", body }));
  button.disabled = false;
  button.textContent = "Start";
  if (made) open(made.session);
}

async function upload() {
  const [file] = byId("upload").files;
  byId("upload").value = "";
  if (!file) return;
  const made = await attempt(() => request("/sessions/upload-run", { method: "POST", file }));
  if (made) open(made.session);
}

function listCasts(casts) {
  byId("first-cast").replaceChildren(...casts.map((cast) => make("label", { class: "pick" }, make("input", { type: "checkbox", value: cast.name }),
    cast.thumbnail ? make("img", { src: cast.thumbnail, alt: "" }) : null, `@${cast.name}`)));
}

function listSessions(sessions, about) {
  const host = byId("sessions"), again = () => showStart(about);
  const act = (session, method, rest = "") => attempt(async () => { await request(`/sessions/${encodeURIComponent(session)}${rest}`, { method }); again(); });
  host.replaceChildren(...[...sessions].sort((a, b) => (b.created ?? 0) - (a.created ?? 0)).map((each) => {
    const facts = [each.created && new Date(1000 * each.created).toLocaleString(), each.seconds !== undefined && `${each.seconds.toFixed(1)} s`, each.open && "open", each.message];
    return make("div", { class: "session" },
      make("button", { type: "button", class: "open", onclick: () => open(each.session) },
        make("span", {}, make("b", {}, each.prompt ?? each.cues?.[0]?.prompt ?? each.session), make("span", { class: "quiet small" }, facts.filter(Boolean).join(" · ")))),
      each.open ? make("button", { type: "button", class: "mini", title: "Stop it; it stays on disk", onclick: () => act(each.session, "POST", "/close") }, "close") : null,
      make("button", { type: "button", class: "mini", title: "Delete this session and its files", onclick: () => act(each.session, "DELETE") }, "×"));
  }));
  if (!sessions.length) host.append(make("p", { class: "quiet small" }, "None yet. What you start is kept here and continues where it stopped."));
}
