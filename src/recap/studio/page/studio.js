// The studio's page: which session is shown, the controls, and the keyboard.
import { byId } from "./dom.js";
import { beginDemo } from "./demo.js";
import { acceptDrops } from "./memory.js";
import { inHash, openSession, request } from "./net.js";
import { attempt } from "./notices.js";
import { Room } from "./room.js";
import { showStart } from "./start.js";

const JUMP_S = 1;
let about, room = null;

// --- controls that are there once
byId("direct").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt-text").value.trim();
  if (text && room?.state) room.prompt(text);
});
byId("prompt-text").addEventListener("input", () => { byId("prompt-refused").textContent = ""; });
byId("later").addEventListener("change", () => {
  byId("at").disabled = !byId("later").checked;
  if (byId("later").checked && room) byId("at").value = (Math.ceil((room.end + 2) * 4) / 4).toFixed(2);
});
byId("cut").addEventListener("change", () => { if (byId("cut").checked) byId("reread").checked = false; });
byId("reread").addEventListener("change", () => { if (byId("reread").checked) byId("cut").checked = false; });
byId("play").addEventListener("click", () => room?.setPlaying(!room.playing));
byId("branch-here").addEventListener("click", () => room?.branchHere());
byId("live").addEventListener("click", () => { room?.seek(Math.min(room.seen, room.end - about.block_s)); room?.setPlaying(true); });
byId("keep").addEventListener("click", () => byId("keep").closest("details").removeAttribute("open"));
byId("home").addEventListener("click", () => { location.hash = ""; });
byId("new-session").addEventListener("click", () => { location.hash = ""; });
for (const [name, field] of [["lambda", "reinforcement"], ["capacity", "capacity_frames"]]) {
  byId(name).addEventListener("input", () => { byId(`${name}-value`).textContent = byId(name).value; });
  byId(name).addEventListener("change", () => change(field, +byId(name).value));
}
byId("admission").addEventListener("change", () => change("admission", byId("admission").value));
byId("cast-file").addEventListener("change", async () => {
  const [file] = byId("cast-file").files;
  byId("cast-file").value = "";
  if (file && (await attempt(() => request("/casts", { method: "POST", file })))) room?.drawShelf();
});
acceptDrops(byId("shelf-card"), (slots, name) => room?.save(slots, name));

async function change(field, value) {
  if (!room) return;
  if (await attempt(() => room.stream.ask("set", { [field]: value, playhead_s: room.second }))) room.setSettings({ [field]: value });
  else room.setSettings({});
}

addEventListener("keydown", (event) => {
  if (!room?.state || event.target.closest("input:not([type=checkbox]):not([type=range]), select, textarea")) return;
  if (event.key === " " && !event.target.closest("button, summary, a, label")) {
    event.preventDefault();
    room.setPlaying(!room.playing);
  } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
    if (event.target.closest("input")) return;
    event.preventDefault();
    room.seek(room.second + (event.key === "ArrowLeft" ? -JUMP_S : JUMP_S) * (event.shiftKey ? 5 : 1));
  } else if (event.key === "/") {
    event.preventDefault();
    byId("prompt-text").focus();
  }
});

async function route() {
  if (location.hash === "#demo") {
    const session = await attempt(beginDemo);
    // A reload shall return to this story, not begin another one.
    location.replace(session ? `#session=${session}&demo=1` : "#");
    return;
  }
  const id = inHash("session");
  if (room && room.id !== id) { room.close(); room = null; }
  byId("room").hidden = byId("session-menu").hidden = !id;
  byId("start").hidden = Boolean(id);
  byId("status").textContent = "";
  if (!id) { document.title = "RECAP studio"; showStart(about); return; }
  if (!room) {
    // A session that is only on disk is opened first; one that is live says nothing against it.
    if (!(await attempt(() => openSession(id)))) { location.hash = ""; return; }
    room = new Room(id, about);
  }
}

addEventListener("hashchange", route);
about = await attempt(() => request("/about"));
if (about) {
  about.picture = { ...about.picture, ...about.grid };
  await route();
}
