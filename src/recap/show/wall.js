// A bank as a wall of patches. A bank is {patches, sprite, columns}, the patches in order of first appearance.
const byId = (id) => document.getElementById(id);
const [SECOND, FRAME, ROW, COLUMN, SCORE] = [0, 1, 2, 3, 4];

// Tokens of one frame that touch, corners included, came in together and are shown together.
function joinedGroups(patches) {
  const at = new Map(patches.map((patch, i) => [patch.slice(FRAME, SCORE).join(), i]));
  const seen = new Set(), groups = [];
  patches.forEach((_, first) => {
    if (seen.has(first)) return;
    const group = [first];
    seen.add(first);
    for (let next = 0; next < group.length; next++) {
      const [, frame, row, column] = patches[group[next]];
      for (let dy = -1; dy <= 1; dy++) for (let dx = -1; dx <= 1; dx++) {
        const near = at.get([frame, row + dy, column + dx].join());
        if (near !== undefined && !seen.has(near)) { seen.add(near); group.push(near); }
      }
    }
    groups.push(group);
  });
  return groups;
}

function cutout(wall, bank, group, largest) {
  const patches = group.map((i) => bank.patches[i]);
  const low = (axis) => Math.min(...patches.map((p) => p[axis])), high = (axis) => Math.max(...patches.map((p) => p[axis]));
  const top = low(ROW), left = low(COLUMN), rows = high(ROW) - top + 1, columns = high(COLUMN) - left + 1;
  const widest = Math.min(520, wall.clientWidth);
  const size = Math.max(4, Math.min(largest, Math.floor(190 / rows), Math.floor(widest / columns)));
  const button = document.createElement("button"), box = document.createElement("span");
  button.className = "group"; box.className = "cutout";
  box.style.width = columns * size + "px"; box.style.height = rows * size + "px";
  group.forEach((i) => {
    const patch = bank.patches[i], piece = document.createElement("i");
    piece.dataset.index = i;
    piece.style.cssText = `left:${(patch[COLUMN] - left) * size}px;top:${(patch[ROW] - top) * size}px;` +
      `width:${size}px;height:${size}px;background-size:${bank.columns * size}px auto;` +
      `background-position:-${(i % bank.columns) * size}px -${Math.floor(i / bank.columns) * size}px`;
    piece.style.backgroundImage = "var(--sprite)";
    box.append(piece);
  });
  const when = document.createElement("span");
  when.className = "when";
  when.textContent = Math.min(...patches.map((p) => p[SECOND])).toFixed(1) + " s";
  button.append(box, when);
  button.dataset.index = group[0];
  return button;
}

// Hang a bank; `pick` is called with the index of a clicked patch. Returns a function that shows cut-outs or patches.
// `legend` may be null; `side` is the size of a patch in a cut-out, in pixels.
function hangWall(wall, legend, bank, pick, side = 30) {
  const tip = byId("tip"), patches = bank.patches;
  const indexOf = (event) => event.target.closest("[data-index]")?.dataset.index;
  wall.style.setProperty("--sprite", `url("${bank.sprite}")`);
  wall.addEventListener("click", (event) => { const i = indexOf(event); if (i !== undefined) pick(+i); });
  wall.addEventListener("mousemove", (event) => {
    const i = event.target.tagName === "I" ? indexOf(event) : undefined;
    if (i === undefined) { tip.style.opacity = 0; return; }
    const patch = patches[i];
    tip.textContent = `${patch[SECOND].toFixed(2)} s\nrow ${patch[ROW]}, column ${patch[COLUMN]} of frame ${patch[FRAME]}` +
      `\nscore ${patch[SCORE].toFixed(2)}`;
    tip.style.opacity = 1;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - 190) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - 80) + "px";
  });
  wall.addEventListener("mouseleave", () => { tip.style.opacity = 0; });
  return (joined) => {
    const groups = joined ? joinedGroups(patches) : patches.map((_, i) => [i]);
    wall.replaceChildren(...groups.map((group) => cutout(wall, bank, group, joined ? side : 40)));
    if (legend) legend.textContent = patches.length === 0
      ? "Nothing: after the first frame nothing new appeared."
      : `${patches.length} patches in order of first appearance` +
        (joined ? `, in ${groups.length} cut-outs of what appeared together. ` : ". ") +
        "Hover for details; click to see the moment in the video.";
  };
}

// Flash a mark on the token of a video; the video may stand between black bars, the mark belongs on the picture.
function pointAt(spot, video, [rows, columns], row, column) {
  const scale = Math.min(video.clientWidth / columns, video.clientHeight / rows);
  const left = (video.clientWidth - scale * columns) / 2, top = (video.clientHeight - scale * rows) / 2;
  spot.style.cssText = `left:${left + (column - 0.25) * scale}px;top:${top + (row - 0.25) * scale}px;` +
    `width:${1.5 * scale}px;height:${1.5 * scale}px`;
  spot.classList.remove("shown");
  void spot.offsetWidth;
  spot.classList.add("shown");
}
