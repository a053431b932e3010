// The timeline of prompts, the branches as lanes under it, and the curves; all share one axis of seconds.
import { clamp, inOrder, make, roleColour, roleName, svg } from "./dom.js";

const SHORTEST_S = 14;
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600];

export class Timeline {
  /** `act` has seek(second), schedule(second), dropCue(block), switchTo(branch). */
  constructor(host, act) {
    this.host = host;
    this.act = act;
    this.marks = make("div", { class: "marks" });
    this.cues = make("div", { class: "cues" });
    this.made = make("i", { class: "made" });
    this.seen = make("i", { class: "seen" });
    this.head = make("i", { class: "head" });
    this.track = make("div", { class: "track" }, this.made, this.seen);
    this.lanes = make("div", { class: "lanes" });
    host.append(this.cues, this.track, this.marks, this.lanes, this.head);
    for (const part of [this.track, this.marks]) part.addEventListener("pointerdown", (event) => this.press(event, part));
    this.view = SHORTEST_S;
  }

  press(event, part) {
    const second = (event_) => {
      const box = this.host.getBoundingClientRect();
      return clamp((event_.clientX - box.left) / box.width, 0, 1) * this.view;
    };
    if (second(event) > this.end + 0.05) { this.act.schedule(second(event)); return; }
    const seek = (moved) => this.act.seek(Math.min(second(moved), this.end - 0.03));
    seek(event);
    part.setPointerCapture(event.pointerId);
    part.addEventListener("pointermove", seek);
    part.addEventListener("pointerup", () => part.removeEventListener("pointermove", seek), { once: true });
  }

  at(second) { return `${100 * clamp(second / this.view, 0, 1)}%`; }

  /** Draw all that changes when a block, a cue or a branch comes. */
  draw({ end, cues, branches, branch, secondOf }) {
    this.end = end;
    const last = Math.max(end * 1.12, end + 3, ...cues.map((cue) => cue.second + 3), SHORTEST_S);
    // The axis grows in steps, so that nothing creeps while one looks at it.
    if (last > this.view || last < this.view * 0.6) this.view = Math.max(SHORTEST_S, last * 1.15);
    this.made.style.width = this.at(end);
    const step = STEPS.find((s) => this.view / s <= Math.max(3, this.host.clientWidth / 70)) ?? 600;
    const ticks = [];
    for (let s = 0; s <= this.view; s += step) ticks.push(make("span", { style: { left: this.at(s) } }, s < 60 ? `${s} s` : `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")}`));
    this.marks.replaceChildren(...ticks);
    this.cues.replaceChildren(...cues.map((cue, i) => this.cue(cue, cues[i + 1]?.second ?? Math.max(end, cue.second + 3))));
    this.drawLanes(branches, branch, end, secondOf);
  }

  cue(cue, until) {
    const later = cue.second >= this.end - 1e-3 && cue.block > 0;
    const words = `${cue.second.toFixed(2)} s: ${cue.prompt}${cue.cut ? " (after a cut)" : ""}${cue.reread ? " (past read again)" : ""}`;
    const item = make("div", {
      class: `cue${cue.cut ? " cut" : ""}${later ? " later" : ""}`, title: words,
      style: { left: this.at(cue.second), width: `calc(${100 * (Math.min(until, this.view) - cue.second) / this.view}% - 2px)` },
    }, make("span", {}, cue.prompt));
    if (later) item.append(make("button", { class: "mini", title: "Cancel this prompt", onclick: () => this.act.dropCue(cue.block) }, "×"));
    else item.addEventListener("click", () => this.act.seek(cue.second + 0.001));
    item.dataset.from = cue.second;
    item.dataset.to = until;
    return item;
  }

  drawLanes(branches, branch, end, secondOf) {
    this.lanes.hidden = branches.length < 2;
    if (this.lanes.hidden) { this.lanes.replaceChildren(); return; }
    const order = new Map(branches.map((each, i) => [each.id, i])), height = 24, mid = (i) => i * height + 12;
    const lines = svg("svg", { class: "tree", height: branches.length * height, "aria-hidden": "true" });
    const buttons = branches.map((each, i) => {
      const from = secondOf(each.fork_block ?? 0), to = each.id === branch ? end : Math.max(secondOf(each.blocks ?? each.fork_block), from + 0.3);
      const x = (s) => `${100 * clamp(s / this.view, 0, 1)}%`, mine = each.id === branch;
      if (each.parent !== null && order.has(each.parent)) {
        lines.append(svg("line", { x1: x(from), x2: x(from), y1: mid(order.get(each.parent)), y2: mid(i), class: "twig" }));
      }
      lines.append(svg("line", { x1: x(from), x2: x(to), y1: mid(i), y2: mid(i), class: mine ? "lane mine" : "lane" }),
        svg("circle", { cx: x(from), cy: mid(i), r: 3.5, class: mine ? "knot mine" : "knot" }));
      return make("button", {
        type: "button", class: "branch", "aria-pressed": String(mine), "data-branch": each.id, title: `Branch ${each.id}, from ${from.toFixed(2)} s`,
        style: { left: `min(calc(${x(to)} + 8px), calc(100% - 84px))`, top: `${i * height}px` }, onclick: () => this.act.switchTo(each.id),
      }, each.parent === null ? "first take" : `take ${i + 1}`);
    });
    this.lanes.style.height = `${branches.length * height}px`;
    this.lanes.replaceChildren(lines, ...buttons);
  }

  /** Move the playhead; this runs with every picture. */
  move(second, seen) {
    this.head.style.left = this.at(second);
    this.seen.style.width = this.at(seen);
    for (const item of this.cues.children) item.setAttribute("aria-current", String(second >= +item.dataset.from - 1e-3 && second < +item.dataset.to - 1e-3));
    this.host.setAttribute("aria-valuenow", second.toFixed(1));
    this.host.setAttribute("aria-valuemax", (this.end ?? 0).toFixed(1));
    this.host.setAttribute("aria-valuetext", `${second.toFixed(1)} of ${(this.end ?? 0).toFixed(1)} seconds`);
  }
}

const WIDTH = 300, HEIGHT = 74, TOP = 4;

/** Three small curves: attention by role, motion, likeness. */
export class Curves {
  constructor(host, seek) {
    this.host = host;
    this.heads = [];
    this.seek = seek;
  }

  /** `tracks` is a list of {name, colour, blocks}; blocks in order. */
  draw(tracks, span) {
    this.heads = [];
    this.span = span;
    const parts = [];
    const first = tracks[0];
    if (first?.blocks.some((block) => block.shares && Object.keys(block.shares).length)) {
      parts.push(this.chart("Attention by role", this.areas(first.blocks), "", ["0", "100 %"]));
    }
    for (const [field, title, about] of [
      ["motion", "Motion", "how much the picture moves"], ["likeness", "Likeness", "to the first picture"],
    ]) {
      const values = tracks.flatMap((track) => track.blocks.map((block) => block[field])).filter((value) => value !== null && value !== undefined);
      if (!values.length) continue;
      const top = field === "likeness" ? 1 : Math.max(1e-6, ...values) * 1.1, low = field === "likeness" ? Math.min(0.5, ...values) : 0;
      const lines = tracks.map((track) => svg("path", { class: "line", style: { stroke: track.colour }, d: this.path(track.blocks, field, low, top) }));
      const latest = tracks.map((track) => track.blocks.findLast((block) => block[field] !== null && block[field] !== undefined)?.[field]);
      parts.push(this.chart(title, lines, about, [low ? low.toFixed(1) : "0", top.toPrecision(2)], latest.filter((v) => v !== undefined).map((v) => v.toPrecision(2)).join(" · ")));
    }
    this.host.replaceChildren(...parts);
    this.host.hidden = parts.length === 0;
  }

  x(second) { return WIDTH * clamp(second / this.span, 0, 1); }

  path(blocks, field, low, top) {
    let pen = "M";
    return blocks.map((block) => {
      const value = block[field];
      if (value === null || value === undefined) { pen = "M"; return ""; }
      const y = TOP + (HEIGHT - TOP) * (1 - clamp((value - low) / (top - low), 0, 1)), move = pen;
      pen = "L";
      return `${move}${this.x((block.start_s + block.end_s) / 2).toFixed(1)} ${y.toFixed(1)}`;
    }).join("");
  }

  areas(blocks) {
    const roles = inOrder(new Set(blocks.flatMap((block) => Object.keys(block.shares ?? {})))), below = blocks.map(() => 0);
    const y = (share) => (TOP + (HEIGHT - TOP) * (1 - clamp(share, 0, 1))).toFixed(1);
    return roles.map((role) => {
      const side = (edge) => blocks.map((block, i) => `${this.x(edge ? block.start_s : block.end_s).toFixed(1)} ${y(below[i])}L${this.x(edge ? block.end_s : block.start_s).toFixed(1)} ${y(below[i])}`);
      const floor = side(false).reverse();
      blocks.forEach((block, i) => { below[i] += block.shares?.[role] ?? 0; });
      const shape = svg("path", { d: `M${side(true).join("L")}L${floor.join("L")}Z`, style: { fill: roleColour(role) } });
      shape.append(svg("title", {}, roleName(role)));
      return shape;
    });
  }

  chart(title, shapes, about, [low, top], latest = "") {
    const head = svg("line", { class: "playhead", y1: 0, y2: HEIGHT });
    this.heads.push(head);
    const drawing = svg("svg", { class: "curve", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" },
      svg("line", { class: "rule", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }), ...shapes, head);
    drawing.addEventListener("click", (event) => {
      const box = drawing.getBoundingClientRect();
      this.seek((event.clientX - box.left) / box.width * this.span);
    });
    return make("figure", {}, make("figcaption", {}, make("b", {}, title), make("span", {}, about), make("em", {}, latest)),
      make("div", { class: "framed" }, drawing, make("i", { class: "top" }, top), make("i", { class: "low" }, low)));
  }

  move(second) {
    for (const head of this.heads) { head.setAttribute("x1", this.x(second)); head.setAttribute("x2", this.x(second)); }
  }
}
