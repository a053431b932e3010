// One session on the page: what the server says about it, where the viewer is, and drawing that.
import { byId, choices, clamp, icon, inOrder, make, options, roleName } from "./dom.js";
import { demoLine, demoRole } from "./demo.js";
import { paintOverlay, showPicked, showShares, Strips, Wall } from "./memory.js";
import { address, inHash, openSession, request, Stream } from "./net.js";
import { attempt, complain, dismiss, notice } from "./notices.js";
import { Pace, Player } from "./player.js";
import { Curves, Timeline } from "./timeline.js";

const TRACK_COLOURS = ["var(--new)", "var(--cutoff)", "var(--summary)"];
// The page follows with about the rate of the pictures: more would take time from the model on the same machine.
const WHOLE_BLOCKS = 200, FOLLOW_MS = 66, TELL_MS = 200, STRAY_S = 0.08;

/** Shows one session; `Room` adds what the viewer can do. */
export class View {
  constructor(id, about) {
    this.id = id;
    this.about = about;
    this.base = `/sessions/${encodeURIComponent(id)}`;
    this.shape = this.about.picture;
    this.players = [];
    this.infos = new Map(); // track -> Map(block index -> info)
    this.playing = true;
    this.seen = 0;
    this.stamp = 0;
    this.role = "off";
    this.watched = 0; // the track whose memory is shown
    this.strips = new Strips((info) => address(`${this.block(info.track, info.branch, info.index)}.jpg?n=${info.stamp}`));
    this.wall = new Wall(byId("wall"), byId("bank-legend"), {
      strips: this.strips, shape: this.shape, blockOf: (track, block) => this.infos.get(track)?.get(block), pick: (group, canvas) => this.pick(group, canvas),
    });
    byId("timeline").replaceChildren();
    this.timeline = new Timeline(byId("timeline"), {
      seek: (second) => this.seek(second), schedule: (second) => this.schedule(second),
      dropCue: (block) => attempt(() => this.stream.ask("drop_cue", { block })), switchTo: (branch) => this.switchTo(branch),
    });
    this.curves = new Curves(byId("curves"), (second) => this.seek(second));
    this.pace = new Pace(this.about.block_s);
    this.stream = new Stream(id, {
      hello: (m) => this.hello(m), block: (m) => this.onBlock(m), media: (header, bytes) => this.onMedia(header, bytes),
      dropped: (m) => this.onDropped(m), cue: (m) => this.onCue(m), branch: (m) => this.onBranch(m),
      status: (m) => this.onStatus(m), error: (m) => complain(m.text), notice: (m) => notice(m.text || m.message), link: (up, why) => this.onLink(up, why),
    });
    this.timer = setInterval(() => this.tend(), TELL_MS);
    this.follow();
  }

  close() {
    this.stream.close();
    clearInterval(this.timer);
    clearTimeout(this.next);
    this.closed = true;
    this.players.forEach((player) => player.close());
    this.wall.clear();
    showPicked(byId("picked"), null);
  }

  block(track, branch, index) { return `${this.base}/tracks/${encodeURIComponent(track)}/branches/${encodeURIComponent(branch)}/blocks/${index}`; }

  // --- what the server says
  hello(message) {
    const before = this.state;
    const m = { ...message, tracks: Object.entries(message.tracks).map(([name, track]) => ({ name, ...track })) };
    this.state = m;
    this.branch = m.branch;
    this.branches = m.branches;
    this.playing = m.playing !== false;
    const names = m.tracks.map((track) => track.name);
    const same = before && names.join() === before.tracks.map((track) => track.name).join();
    if (!same) this.buildScreens(m.tracks);
    const at = same ? this.second : undefined;
    for (const [i, name] of names.entries()) {
      const list = m.blocks?.[name] ?? [];
      this.players[i].reset();
      this.infos.set(name, new Map());
      [...this.untold(list), ...list].forEach((info) => this.note({ track: name, branch: m.branch, ...info }));
    }
    this.seen = m.seen_s;
    this.onStatus(m.status);
    this.setCues(m.cues);
    this.setSettings(m.settings);
    this.setCast(m.cast);
    this.keepMenu();
    const start = this.goal ?? at ?? this.seen;
    this.goal = undefined;
    this.seek(clamp(start, 0, Math.max(0, this.end - 0.05)));
    this.setPlaying(this.playing, false);
    this.redraw();
    this.pick(null);
    document.title = `${m.cues?.[0]?.prompt ?? "RECAP studio"} · RECAP studio`;
  }

  /** Of a long video the server describes the last blocks only; the others are as long, but for the first, and can be fetched. */
  untold(list) {
    const [first] = list, start = (index) => (index ? first.start_s - (first.index - index) * this.about.block_s : 0);
    return Array.from({ length: first?.index ?? 0 }, (_, index) => ({ index, start_s: start(index), end_s: start(index + 1) }));
  }

  buildScreens(tracks) {
    this.players.forEach((player) => player.close());
    this.screens = tracks.map((track, i) => {
      const video = make("video", { playsinline: true, disablepictureinpicture: true });
      video.muted = true;
      const screen = make("div", { class: "screen", style: { aspectRatio: `${this.shape.width} / ${this.shape.height}` } },
        video, make("canvas", { class: "over" }), make("i", { class: "spot" }), make("p", { class: "veil" }, "The first pictures are on their way."));
      screen.addEventListener("click", () => this.setPlaying(!this.playing));
      screen.addEventListener("dblclick", () => screen.requestFullscreen?.());
      return make("figure", {}, screen, tracks.length > 1
        ? make("figcaption", {}, make("i", { class: "chip", style: { background: TRACK_COLOURS[i] } }), track.memory ?? track.name) : null);
    });
    byId("screens").replaceChildren(...this.screens);
    byId("screens").dataset.count = tracks.length;
    this.players = tracks.map((track, i) => new Player(this.screens[i].querySelector("video"), {
      source: (block) => `${this.block(track.name, this.branch, block)}.m4s`, fail: (words) => complain(words),
    }));
    this.lead.watch((second) => this.onPicture(second));
    this.watched = clamp(this.watched, 0, tracks.length - 1);
    this.drawWhose();
  }

  drawWhose() {
    const tracks = this.state.tracks;
    byId("whose").hidden = tracks.length < 2;
    choices(byId("whose"), tracks.map((track, i) => [i, track.memory ?? track.name]), this.watched, (i) => { this.watched = i; this.drawWhose(); this.shown = null; });
  }

  indexOf(track) { return this.state ? this.state.tracks.findIndex((each) => each.name === track) : -1; }

  note(info) {
    info.stamp = ++this.stamp;
    info.pictures ??= Math.round((info.end_s - info.start_s) * this.shape.per_second);
    this.infos.get(info.track)?.set(info.index, info);
    this.players[this.indexOf(info.track)]?.know(info.index, info.start_s, info.end_s);
  }

  /** Old blocks are described in short at first; bank and overlay are fetched when they are looked at. */
  async complete(info) {
    if (info.bank !== undefined || info.asked) return;
    info.asked = true;
    const whole = await request(`${this.block(info.track, info.branch, info.index)}.json`).catch(() => null);
    if (!whole || this.infos.get(info.track)?.get(info.index) !== info) return;
    Object.assign(info, { ...whole, track: info.track, branch: info.branch });
    this.shown = null;
  }

  onBlock(info) {
    if (!this.state || info.branch !== this.branch) return;
    this.note(info);
    // Of old blocks only the short form is kept, so that hours of video do not fill the browser.
    const old = this.infos.get(info.track).get(info.index - WHOLE_BLOCKS);
    if (old) { delete old.bank; delete old.overlay; delete old.asked; }
    this.redraw();
  }

  async onMedia(header, bytes) {
    const player = this.players[this.indexOf(header.track)];
    if (!player) return;
    if (header.kind === "init") player.begin(header.codec, bytes);
    else if (header.branch === this.branch) player.add(header.block, bytes).then(() => this.run());
  }

  onDropped({ track, branch, from_block }) {
    if (!this.state || branch !== this.branch) return;
    for (const [name, infos] of this.infos) {
      if (track !== undefined && track !== null && track !== name) continue;
      for (const index of [...infos.keys()]) if (index >= from_block) infos.delete(index);
      this.players[this.indexOf(name)]?.drop(from_block);
    }
    this.redraw();
  }

  onCue(m) {
    if (!this.state || m.branch !== this.branch) return;
    this.setCues(m.cues);
    if (m.settings) this.setSettings(m.settings);
    if (m.cast) this.setCast(m.cast);
  }

  onBranch(m) {
    if (!this.branches.some((each) => each.id === m.id)) this.branches = [...this.branches, m];
    // Another branch has other blocks, prompts and settings: the server sends all of it after a reconnection.
    if (m.current !== this.branch) this.stream.again();
    else this.redraw();
  }

  onStatus(m) {
    this.status = m;
    if (m.state && (m.state === "playing") !== this.playing) this.setPlaying(m.state === "playing", false);
    if (m.message && m.message !== this.lastMessage) (m.state === "failed" ? complain : notice)(m.message);
    this.lastMessage = m.message;
  }

  onLink(up, why) {
    if (up) { dismiss("link"); return; }
    if (why?.again === false) {
      this.reopen();
    } else {
      complain("The connection to the studio was lost. The page keeps trying; what was generated is safe.", "link");
    }
  }

  /** A server that was started again has the session on disk, and opens it when asked. */
  async reopen() {
    if (await attempt(() => openSession(this.id))) this.stream.open();
    else location.hash = "";
  }

  setCues(cues) {
    this.cues = (cues ?? []).map((cue) => ({ ...cue, second: cue.start_s ?? cue.second }));
    this.redraw();
  }

  setSettings(settings) {
    this.settings = { ...this.settings, ...settings };
    const { reinforcement, capacity_frames: capacity, admission } = this.settings;
    const put = (name, value) => {
      byId(name).closest("label").hidden = value === undefined || value === null;
      if (value === undefined || value === null) return;
      if (document.activeElement !== byId(name)) byId(name).value = value;
      byId(`${name}-value`).textContent = String(value);
    };
    put("lambda", reinforcement);
    // A schedule is shown as it is written; the slider would replace it by a number.
    byId("lambda").disabled = typeof reinforcement === "string";
    put("capacity", capacity);
    byId("admission").closest("label").hidden = !admission;
    options(byId("admission"), (this.about.admissions ?? []).map((name) => [name, name]), admission);
  }

  setCast(names) { if (names) this.cast = names.map((each) => each.name ?? each); this.drawShelf(); }

  // --- time
  get lead() { return this.players[0]; }
  get second() { return this.lead?.second ?? 0; }
  get end() {
    const ends = [...this.infos.values()].map((infos) => Math.max(0, ...[...infos.values()].map((info) => info.end_s)));
    return ends.length ? Math.min(...ends) : 0;
  }

  infoAt(second, track = this.state?.tracks[this.watched]?.name) {
    const infos = this.infos.get(track);
    if (!infos) return undefined;
    let last;
    for (const info of infos.values()) {
      if (second >= info.start_s - 1e-3 && second < info.end_s - 1e-3) return info;
      if (info.end_s <= second + 0.1 && (!last || info.end_s > last.end_s)) last = info;
    }
    return last;
  }

  secondOf(block) {
    const info = this.infos.get(this.state.tracks[0].name)?.get(block);
    // The first block is shorter, so a block that is not here begins as much earlier.
    const first = this.infos.get(this.state.tracks[0].name)?.get(0);
    return info ? info.start_s : block ? (first?.end_s ?? 0) + (block - 1) * this.about.block_s : 0;
  }

  seek(second) {
    const to = clamp(second, 0, Math.max(0, this.end - 0.03));
    for (const player of this.players) player.seek(to);
    this.stream.send("playhead", { second: to });
    this.shown = null;
  }

  setPlaying(wanted, report = true) {
    this.playing = wanted;
    this.run();
    if (report) attempt(() => this.stream.ask(wanted ? "play" : "pause"));
    byId("play").replaceChildren(icon(wanted ? "pause" : "play"));
    byId("play").setAttribute("aria-label", wanted ? "Pause" : "Play");
  }

  /** Some times a second: keep the buffers full, the rate smooth, and the server informed. */
  tend() {
    if (!this.state) return;
    this.players.forEach((player) => player.tend());
    const ready = this.run();
    const perSecond = this.status?.rate ?? null, speed = perSecond === null ? 1 : perSecond / this.shape.per_second;
    const atFront = this.end - this.second < this.about.block_s * (this.about.lead_blocks + 1);
    const rate = atFront ? this.pace.next(ready, speed) : 1;
    for (const player of this.players) if (player.video.playbackRate !== rate) player.video.playbackRate = rate;
    this.screens.forEach((figure, i) => { figure.querySelector(".veil").hidden = this.players[i].video.readyState > 1; });
    this.stream.send("playhead", { second: this.second });
    this.sayRate(rate, perSecond);
  }

  /** Let the videos run when they should and can; returns how many seconds are ready. */
  run() {
    const ready = this.players.length ? Math.min(...this.players.map((player) => player.ready())) : 0;
    const runs = this.pace.mayRun(ready, Math.max(0.1, this.lead ? this.lead.known() - this.second - 0.1 : 0.1));
    this.waiting = this.playing && !runs;
    for (const { video } of this.players) {
      if (this.playing && runs && video.paused) video.play().catch(() => {});
      else if (!(this.playing && runs) && !video.paused) video.pause();
    }
    return ready;
  }

  sayRate(rate, perSecond) {
    const bits = [];
    if (!this.playing) bits.push("paused");
    else if (this.waiting && this.end - this.second > this.about.block_s) bits.push("fetching");
    else if (this.waiting) bits.push("waiting for the next block");
    else if (rate < 1) bits.push(`plays at ${(rate * this.shape.per_second).toFixed(1)} pictures/s (${rate.toFixed(2)}×)`);
    else bits.push(`plays at ${this.shape.per_second} pictures/s`);
    if (perSecond) bits.push(`generates ${perSecond.toFixed(1)}/s`);
    const words = bits.join(" · ");
    if (byId("status").textContent !== words) byId("status").textContent = words;
    byId("status").dataset.rate = rate;
  }

  /** With every picture: clock, playhead, wall, overlay. */
  follow() {
    if (this.closed) return;
    clearTimeout(this.next);
    this.next = setTimeout(() => this.follow(), FOLLOW_MS);
    if (!this.state) return;
    const second = this.second;
    this.seen = Math.max(this.seen, second);
    for (const player of this.players.slice(1)) {
      if (!player.video.seeking && Math.abs(player.second - second) > STRAY_S && player.ready(second) > 0) player.seek(second);
    }
    const clock = second.toFixed(1);
    if (byId("now").textContent !== clock) byId("now").textContent = clock;
    this.timeline.move(second, Math.min(this.seen, this.end));
    this.curves.move(second);
    const behind = this.end - second > this.about.block_s * (this.about.lead_blocks + 1.5);
    byId("live").hidden = !behind;
    const info = this.infoAt(second);
    if (info && info !== this.shown) {
      this.shown = info;
      this.state.tracks.forEach((track) => { const at = this.infoAt(second, track.name); if (at) this.complete(at); });
      const track = this.state.tracks[this.watched].name;
      if (info.bank !== undefined) this.wall.show(info, track);
      showShares(byId("shares"), info.shares);
      this.drawOverlaySwitch(info);
      this.screens.forEach((figure, i) => {
        paintOverlay(figure.querySelector(".over"), this.players[i].video, this.infoAt(second, this.state.tracks[i].name), this.role, this.shape);
      });
      const story = inHash("demo") !== null;
      byId("caption").hidden = !story;
      if (story) this.tellStory(second);
      const next = this.nextUnseen();
      byId("takes-effect").textContent = byId("later").checked ? "" : `Enter: from ${next.toFixed(1)} s on, the first moment not seen yet`;
    }
  }

  /** A picture is on the screen; the first one of a new prompt ends the wait for it. */
  onPicture(mediaSecond) {
    if (!this.sent || mediaSecond < this.sent.second - 1e-3) return;
    const took = (performance.now() - this.sent.at) / 1000;
    byId("latency").textContent = `new prompt on screen after ${took.toFixed(1)} s`;
    byId("latency").dataset.seconds = took.toFixed(3);
    this.sent = null;
  }

  tellStory(second) {
    const prompts = this.withSeconds(), role = demoRole(prompts, second);
    byId("caption").textContent = demoLine(prompts, second);
    // Once: who switches it off has seen it.
    if (role && !this.storyShown) { this.storyShown = true; this.role = role; this.shown = null; }
  }

  nextUnseen() {
    const info = this.infoAt(Math.min(this.seen, this.end - 1e-3), this.state.tracks[0].name);
    return info ? info.end_s : 0;
  }

  redraw() {
    if (!this.state || this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = null;
      this.timeline.draw({ end: this.end, cues: this.withSeconds(), branches: this.branches, branch: this.branch, secondOf: (block) => this.secondOf(block) });
      byId("end").textContent = ` of ${this.end.toFixed(1)} s`;
      const tracks = this.state.tracks.map((track, i) => ({ name: track.name, colour: TRACK_COLOURS[i], blocks: [...this.infos.get(track.name).values()].sort((a, b) => a.index - b.index) }));
      if (tracks.length > 1) tracks.unshift(tracks.splice(this.watched, 1)[0]);
      this.curves.draw(tracks, Math.max(6, this.end));
      this.shown = null;
    });
  }

  withSeconds() {
    return this.cues.map((cue) => ({ ...cue, second: cue.second ?? this.secondOf(cue.block) }));
  }

  drawOverlaySwitch(info) {
    const maps = inOrder(Object.keys(info.overlay?.roles ?? {})).filter((role) => role !== "current");
    const list = [["off", "Nothing"], ...(info.bank ? [["new", "New", "Patches of this block that entered the bank"]] : []), ...maps.map((role) => [role, roleName(role).split(" ")[0], "Where in the picture it is attended to"])];
    const words = !info.overlay && info.overlay !== undefined ? "Where the picture reads its memory is not known: the fast kernels of this model do not measure it."
      : info.overlay?.measured === "clean pass" ? "Measured in the clean pass: the fast kernels of the steps do not measure it." : "";
    const key = list.join() + this.role + words;
    if (key === this.overlayKey) return;
    this.overlayKey = key;
    byId("overlay-words").textContent = words;
    byId("overlay-words").hidden = !words;
    choices(byId("overlay"), list, this.role, (role) => { this.role = role; this.shown = null; });
  }
}
