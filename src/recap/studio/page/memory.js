// Shows what a session remembers: a bar of attention, the bank as a wall of cut-outs, and the overlay on the picture.
import { byId, inOrder, make, roleColour, roleName, roleWords } from "./dom.js";

const SIDE_PX = 21, ENTRY = (patch) => `${patch.frame}.${patch.row}.${patch.column}`;

/** Pictures of blocks, one image per block that has them side by side. */
export class Strips {
  constructor(path) { this.path = path; this.images = new Map(); }

  load(info) {
    const key = `${info.track}/${info.branch}/${info.index}/${info.stamp}`;
    if (!this.images.has(key)) {
      const image = new Image();
      image.src = this.path(info);
      this.images.set(key, image.decode().then(() => image, () => null));
      if (this.images.size > 240) this.images.delete(this.images.keys().next().value);
    }
    return this.images.get(key);
  }

  /** Draw the square of one patch; `info` is the block it was first seen in. */
  async draw(context, info, patch, shape, x, y, size) {
    const image = await this.load(info);
    if (!image) return;
    const width = image.naturalWidth / info.pictures, scale = width / shape.width, side = shape.token_pixels * scale;
    context.drawImage(image, patch.picture * width + patch.column * side, patch.row * side, side, side, x, y, size, size);
  }
}

/** Patches of one frame that touch, corners included, came in together and are shown together. */
export function joined(patches) {
  const at = new Map(patches.map((patch) => [ENTRY(patch), patch])), seen = new Set(), groups = [];
  for (const first of patches) {
    if (seen.has(first)) continue;
    const group = [first];
    seen.add(first);
    for (const patch of group) {
      for (let dy = -1; dy <= 1; dy++) for (let dx = -1; dx <= 1; dx++) {
        const near = at.get(`${patch.frame}.${patch.row + dy}.${patch.column + dx}`);
        if (near && !seen.has(near)) { seen.add(near); group.push(near); }
      }
    }
    groups.push(group);
  }
  return groups.sort((a, b) => a[0].second - b[0].second || a[0].frame - b[0].frame);
}

const sum = (numbers) => numbers.reduce((total, number) => total + (number || 0), 0);
const percent = (share) => (share < 0.0005 ? "< 0.1 %" : `${share < 0.0995 ? (100 * share).toFixed(1) : Math.round(100 * share)} %`);

/** The bank as cut-outs. It keeps the elements of what stays, so that only new ones move. */
export class Wall {
  constructor(host, legend, { strips, shape, blockOf, pick }) {
    Object.assign(this, { host, legend, strips, shape, blockOf, pick });
    this.tiles = new Map();
    this.hung = new Set();
    this.picked = "";
  }

  clear() { this.tiles.clear(); this.hung.clear(); this.host.replaceChildren(); this.picked = ""; }

  show(info, track) {
    const patches = info?.bank ?? null;
    if (!patches) {
      this.clear();
      this.legend.textContent = info ? "This memory has no bank: it keeps whole frames only." : "";
      return;
    }
    const groups = joined(patches), keys = new Set();
    const tiles = groups.map((group) => {
      const key = track + group.map(ENTRY).sort().join();
      keys.add(key);
      const tile = this.tiles.get(key) ?? this.tile(group, track);
      this.tiles.set(key, tile);
      tile.group = group;
      tile.key = key;
      tile.querySelector(".share").style.width = `${Math.min(100, 100 * sum(group.map((patch) => patch.share)) / (this.largest || 1))}%`;
      tile.setAttribute("aria-pressed", String(key === this.picked));
      return tile;
    });
    for (const [key, tile] of this.tiles) if (!keys.has(key)) { tile.remove(); this.tiles.delete(key); }
    this.largest = Math.max(1e-6, ...groups.map((group) => sum(group.map((patch) => patch.share))));
    // Elements that stay are not moved: a moved element would begin its animation again.
    tiles.forEach((tile, i) => { if (this.host.children[i] !== tile) this.host.insertBefore(tile, this.host.children[i] ?? null); });
    this.hung = new Set(patches.map(ENTRY));
    this.legend.textContent = patches.length === 0
      ? "The bank is empty: nothing new has appeared after the first picture."
      : `${patches.length} patches in ${groups.length} cut-outs, oldest first. Click one to see its moment, pin or forget it.`;
    if (this.picked && !keys.has(this.picked)) this.followPicked(tiles);
  }

  tile(group, track) {
    const low = (axis) => Math.min(...group.map((patch) => patch[axis])), high = (axis) => Math.max(...group.map((patch) => patch[axis]));
    const top = low("row"), left = low("column"), rows = high("row") - top + 1, columns = high("column") - left + 1;
    const size = Math.max(6, Math.min(SIDE_PX, Math.floor(150 / rows), Math.floor(320 / columns)));
    const canvas = make("canvas", { width: columns * size * 2, height: rows * size * 2, style: { width: `${columns * size}px`, height: `${rows * size}px` } });
    const context = canvas.getContext("2d");
    for (const patch of group) {
      const info = this.blockOf(track, patch.block);
      if (info) this.strips.draw(context, info, patch, this.shape, (patch.column - left) * size * 2, (patch.row - top) * size * 2, size * 2);
    }
    const tile = make("button", { class: group.every((patch) => this.hung.has(ENTRY(patch))) ? "tile" : "tile fresh", draggable: "true", type: "button" }, canvas,
      make("span", { class: "meter" }, make("i", { class: "share" })), make("span", { class: "when" }, `${group[0].second.toFixed(1)} s`));
    tile.addEventListener("click", () => this.choose(tile));
    tile.addEventListener("dragstart", (event) => {
      event.dataTransfer.setData("application/x-recap-slots", JSON.stringify(tile.group.map((patch) => patch.slot)));
      event.dataTransfer.effectAllowed = "copy";
      this.choose(tile);
    });
    return tile;
  }

  /** A cut-out that gained or lost patches is still the picked one; one that left the bank is not. */
  followPicked(tiles) {
    const tile = tiles.find((each) => each.group.some((patch) => ENTRY(patch) === this.pickedEntry));
    if (tile) this.choose(tile);
    else { this.picked = ""; this.pick(null); }
  }

  choose(tile) {
    this.picked = tile.key;
    this.pickedEntry = ENTRY(tile.group[0]);
    this.mark();
    this.pick(tile.group, tile.querySelector("canvas"));
  }

  mark() { for (const tile of this.host.children) tile.setAttribute("aria-pressed", String(tile.key === this.picked)); }
  unpick() { this.picked = ""; this.mark(); }
}

/** What is known about the picked cut-out, and what can be done with it. */
export function showPicked(host, group, canvas, act) {
  host.hidden = !group;
  if (!group) { host.replaceChildren(); return; }
  const copy = make("canvas", { width: canvas.width, height: canvas.height });
  copy.getContext("2d").drawImage(canvas, 0, 0);
  const facts = [
    ["First seen", `${group[0].second.toFixed(2)} s`],
    ["Age", group[0].age_s === undefined ? "–" : `${group[0].age_s.toFixed(1)} s`],
    ["Newness", (sum(group.map((patch) => patch.score)) / group.length).toFixed(2)],
    ["Attention", typeof group[0].share !== "number" ? "not measured" : percent(sum(group.map((patch) => patch.share)))],
  ];
  const before = host.querySelector("#pick-name"), typing = before && before === document.activeElement;
  const name = make("input", { value: before?.value, placeholder: "name", "aria-label": "Name of the subject", maxlength: 32, id: "pick-name" });
  const button = (label, what, title) => make("button", { type: "button", title, onclick: () => act(what, group, name.value.trim()) }, label);
  host.replaceChildren(
    make("div", { class: "picked-top" }, copy, make("dl", {}, ...facts.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, value))))),
    make("div", { class: "acts" },
      button("See the moment", "see", "Go to the second at which it first appeared"),
      button("Forget", "forget", "Empty these slots of the bank"), name,
      button("Pin", "pin", "Keep it in slots of its own, from which nothing is evicted"),
      button("Save to cast", "save", "Keep it as a cast file, for this video and others")),
  );
  if (typing) name.focus();
}

/** The shares of attention of one block, as one bar. */
export function showShares(host, shares) {
  const roles = inOrder(Object.keys(shares ?? {})).filter((role) => shares[role] > 0.0005);
  host.replaceChildren(
    make("div", { class: "bar" }, ...roles.map((role) => make("i", { style: { flexGrow: String(shares[role]), background: roleColour(role) }, title: `${roleName(role)}: ${percent(shares[role])}` }))),
    make("div", { class: "keys" }, ...roles.map((role) => make("span", { title: roleWords(role) },
      make("i", { class: "chip", style: { background: roleColour(role) } }), `${roleName(role)} `, make("b", {}, percent(shares[role]))))),
  );
  host.hidden = roles.length === 0;
}

/** Paint over the picture where a role is attended to, or which patches of this block are in the bank. */
export function paintOverlay(canvas, video, info, role, shape) {
  const context = canvas.getContext("2d");
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  context.clearRect(0, 0, width, height);
  if (!info || role === "off") return;
  context.globalAlpha = 1;
  if (role === "new") {
    context.fillStyle = context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--new").trim();
    const cell = [width / shape.columns, height / shape.rows];
    context.lineWidth = 2;
    for (const patch of info.bank ?? []) {
      if (patch.second < info.start_s - 1e-3 || patch.second >= info.end_s) continue;
      context.globalAlpha = 0.22;
      context.fillRect(patch.column * cell[0], patch.row * cell[1], cell[0], cell[1]);
      context.globalAlpha = 0.9;
      context.strokeRect(patch.column * cell[0] + 1, patch.row * cell[1] + 1, cell[0] - 2, cell[1] - 2);
    }
    return;
  }
  const map = info.overlay?.roles?.[role];
  if (!map) return;
  // Light stays where the role is read, and the rest is dimmed: a tint would be lost on pictures of its colour.
  const { rows, columns } = info.overlay, most = Math.max(...map), least = Math.min(...map);
  const small = make("canvas", { width: columns, height: rows }), shade = small.getContext("2d");
  shade.fillStyle = "#05080c";
  map.forEach((value, i) => {
    shade.globalAlpha = 0.78 * (1 - (value - least) / Math.max(1e-9, most - least));
    shade.fillRect(i % columns, Math.floor(i / columns), 1, 1);
  });
  // One pixel per place, enlarged softly: the places are coarse, and edges between them mean nothing.
  context.imageSmoothingQuality = "high";
  context.drawImage(small, 0, 0, width, height);
}

/** Flash a mark on one patch of the picture. */
export function pointAt(screen, group, shape) {
  const spot = screen.querySelector(".spot"), low = (axis) => Math.min(...group.map((patch) => patch[axis]));
  const high = (axis) => Math.max(...group.map((patch) => patch[axis])) + 1;
  Object.assign(spot.style, {
    left: `${100 * low("column") / shape.columns}%`, top: `${100 * low("row") / shape.rows}%`,
    width: `${100 * (high("column") - low("column")) / shape.columns}%`, height: `${100 * (high("row") - low("row")) / shape.rows}%`,
  });
  spot.classList.remove("shown");
  void spot.offsetWidth;
  spot.classList.add("shown");
}

/** The cast shelf: who can join, who is in, and a place to drop a cut-out. */
export function showShelf(shelf, casts, inUse, { join, leave, remove, download }) {
  const cards = casts.map((cast) => {
    const used = inUse.includes(cast.name);
    return make("div", { class: "member", "data-name": cast.name },
      cast.thumbnail ? make("img", { src: cast.thumbnail, alt: "" }) : make("span", { class: "blank" }),
      make("div", { class: "who" }, make("b", {}, `@${cast.name}`), make("span", { class: "quiet small" }, used ? "in this video" : cast.words || "")),
      used ? make("button", { type: "button", onclick: () => leave(cast.name) }, "Let go") : make("button", { type: "button", onclick: () => join(cast.name) }, "Use"),
      make("a", { class: "mini", href: download(cast.name), download: `${cast.name}.cast`, title: "Download the cast file" }, "↓"),
      make("button", { type: "button", class: "mini", title: "Delete from the shelf", onclick: () => remove(cast.name) }, "×"));
  });
  const pinned = inUse.filter((name) => !casts.some((cast) => cast.name === name)).map((name) => make("div", { class: "member", "data-name": name },
    make("span", { class: "blank" }), make("div", { class: "who" }, make("b", {}, `@${name}`), make("span", { class: "quiet small" }, "pinned")),
    make("button", { type: "button", onclick: () => leave(name) }, "Let go")));
  shelf.replaceChildren(...cards, ...pinned);
  if (!cards.length && !pinned.length) shelf.append(make("p", { class: "quiet small empty" }, "Nobody yet. Drag a cut-out here to keep it: it can play in every later video, as @name in a prompt."));
}

export function acceptDrops(card, save) {
  card.addEventListener("dragover", (event) => {
    if (![...event.dataTransfer.types].includes("application/x-recap-slots")) return;
    event.preventDefault();
    card.classList.add("over");
  });
  card.addEventListener("dragleave", () => card.classList.remove("over"));
  card.addEventListener("drop", (event) => {
    event.preventDefault();
    card.classList.remove("over");
    const slots = JSON.parse(event.dataTransfer.getData("application/x-recap-slots") || "[]");
    if (!slots.length) return;
    const name = make("input", { placeholder: "name, then Enter", maxlength: 32, "aria-label": "Name of the new subject" });
    const form = make("form", { class: "naming" }, name, make("button", { class: "primary" }, "Save"));
    form.addEventListener("submit", (done) => { done.preventDefault(); if (name.value.trim()) { save(slots, name.value.trim()); form.remove(); } });
    byId("shelf").prepend(form);
    name.focus();
  });
}
