// Plays one track of a session: fragments of H.264, one per block, in a MediaSource.
// Old blocks leave the buffer and are fetched again after seeking back to them.
import { clamp } from "./dom.js";
import { request } from "./net.js";

const LONGEST_S = 86400, KEEP_BEHIND_S = 40, FETCH_AHEAD_BLOCKS = 4;

export class Player {
  /** `source(block)` is the path of a block's fragment, `fail(words)` says what went wrong. */
  constructor(video, { source, fail }) {
    this.video = video;
    this.source = source;
    this.fail = fail;
    this.blocks = new Map(); // index -> {start, end}
    this.have = new Set();
    this.fetching = new Set();
    this.jobs = Promise.resolve();
    this.limit = Infinity; // no block from this one on is shown
    this.epoch = 0;
    this.wanted = 0; // where to stand as soon as the browser knows the video
    this.opened = this.open();
  }

  open() {
    if (!window.MediaSource) {
      this.fail("This browser has no Media Source Extensions, which the studio needs to play. Chromium, Firefox and Safari have them.");
      return Promise.resolve();
    }
    this.media = new MediaSource();
    this.video.src = URL.createObjectURL(this.media);
    return new Promise((ready) => this.media.addEventListener("sourceopen", ready, { once: true }));
  }

  /** Do one thing after another with the buffer: it refuses a second one while it works. */
  then(job) {
    this.jobs = this.jobs.then(job).catch((error) => {
      if (this.media?.readyState === "open") this.fail(`The picture could not be played: ${error.message || error}`);
    });
    return this.jobs;
  }

  async begin(codec, bytes) {
    await this.opened;
    this.then(async () => {
      if (!this.buffer) {
        this.buffer = this.media.addSourceBuffer(`video/mp4; codecs="${codec}"`);
        this.buffer.mode = "segments";
      }
      await this.append(bytes);
      if (this.begun) return;
      if (!this.video.readyState) await new Promise((known) => this.video.addEventListener("loadedmetadata", known, { once: true }));
      // A browser seeks no further than what it takes for the end.
      this.media.duration = LONGEST_S;
      this.begun = true;
      this.seek(this.wanted);
    });
  }

  work(step) {
    return new Promise((resolve, reject) => {
      this.buffer.onupdateend = () => resolve();
      this.buffer.onerror = () => reject(new Error("the browser refused a fragment"));
      step();
    });
  }

  async append(bytes) {
    try {
      await this.work(() => this.buffer.appendBuffer(bytes));
    } catch (error) {
      if (error.name !== "QuotaExceededError") throw error;
      await this.remove(0, Math.max(0.1, this.video.currentTime - 5));
      await this.work(() => this.buffer.appendBuffer(bytes));
    }
  }

  async remove(from, to) {
    for (const block of [...this.have]) {
      const { start, end } = this.blocks.get(block) ?? { start: 0, end: Infinity };
      if (start < to - 1e-3 && end > from + 1e-3) this.have.delete(block);
    }
    if (this.buffer && to > from && this.buffer.buffered.length) await this.work(() => this.buffer.remove(from, to));
  }

  /** Tell which blocks exist; a block that is not known here is never shown. */
  know(block, start, end) { this.blocks.set(block, { start, end }); }

  add(block, bytes, epoch = this.epoch) {
    return this.then(async () => {
      if (epoch !== this.epoch || block >= this.limit || this.have.has(block) || !this.begun) return;
      await this.append(bytes);
      this.have.add(block);
    });
  }

  /** Forget blocks from here on: they were dropped, or another branch has its own. */
  drop(block) {
    this.epoch++;
    const from = this.blocks.get(block)?.start;
    for (const index of [...this.blocks.keys()]) if (index >= block) this.blocks.delete(index);
    for (const index of [...this.have]) if (index >= block) this.have.delete(index);
    this.fetching.clear();
    if (from !== undefined) this.then(() => this.remove(from, Infinity));
  }

  /** Forget every block, and empty the buffer: the session says again what there is. */
  reset() {
    this.epoch++;
    this.blocks.clear();
    this.have.clear();
    this.fetching.clear();
    this.then(() => this.remove(0, Infinity));
  }

  /** Show nothing from this block on until `release`: what was generated ahead is about to be dropped. */
  hold(block) {
    this.limit = block;
    const from = this.blocks.get(block)?.start;
    if (from !== undefined) this.then(() => this.remove(from, Infinity));
  }

  release() { this.limit = Infinity; }

  get second() { return this.begun ? this.video.currentTime : this.wanted; }

  /** Call back with the time of every picture that is shown. */
  watch(shown) {
    const next = () => this.video.requestVideoFrameCallback?.((_, picture) => { shown(picture.mediaTime); next(); });
    next();
  }

  seek(second) {
    this.wanted = second;
    if (this.begun) this.video.currentTime = second;
    this.tend(second);
  }

  /** The second at which what is known, and may be shown, ends. */
  known() {
    let end = 0;
    for (const [index, block] of this.blocks) if (index < this.limit) end = Math.max(end, block.end);
    return end;
  }

  blockAt(second) {
    for (const [index, { start, end }] of this.blocks) if (second >= start - 1e-3 && second < end - 1e-3) return index;
    return undefined;
  }

  /** Seconds of picture that are ready from `second` on. */
  ready(second = this.second) {
    const ranges = this.video.buffered;
    for (let i = 0; i < ranges.length; i++) {
      if (second >= ranges.start(i) - 0.08 && second < ranges.end(i)) return ranges.end(i) - second;
    }
    return 0;
  }

  /** Fetch what is missing from the present moment on, and let go of what is long past. */
  tend(second = this.second) {
    if (!this.begun) return;
    const at = this.blockAt(second);
    if (at !== undefined) for (let block = at; block < at + FETCH_AHEAD_BLOCKS; block++) this.fetch(block);
    const old = second - KEEP_BEHIND_S, first = this.video.buffered.length ? this.video.buffered.start(0) : Infinity;
    if (first < old - 10) this.then(() => this.remove(0, old));
    // A gap of a rounding error at a border of two blocks must not stop the picture.
    const ranges = this.video.buffered;
    for (let i = 0; i < ranges.length; i++) {
      const gap = ranges.start(i) - second;
      if (gap > 0 && gap < 0.1 && !this.video.seeking) this.video.currentTime = ranges.start(i) + 0.001;
    }
  }

  async fetch(block) {
    if (!this.blocks.has(block) || this.have.has(block) || this.fetching.has(block) || block >= this.limit) return;
    const epoch = this.epoch;
    this.fetching.add(block);
    try {
      await this.add(block, await request(this.source(block), { raw: true }), epoch);
    } catch (error) {
      if (epoch === this.epoch && this.blocks.has(block)) this.fail(`Block ${block} could not be fetched. ${error.message}`);
      await new Promise((later) => setTimeout(later, 2000));
    } finally {
      this.fetching.delete(block);
    }
  }

  close() {
    this.epoch++;
    this.video.removeAttribute("src");
    this.video.load();
  }
}

/** Chooses at which rate to play, so that the picture slows down a little instead of standing still. */
export class Pace {
  constructor(blockSeconds) {
    this.block = blockSeconds;
    this.rate = 1;
    this.rolling = false;
  }

  /** Tell whether to run now: after a stop a whole block is waited for, so that it does not stop again at once. */
  mayRun(ready, left) {
    if (this.rolling && ready < 0.03) this.rolling = false;
    else if (!this.rolling && ready >= Math.min(0.85 * this.block, left)) this.rolling = true;
    return this.rolling;
  }

  /** `ready` seconds lie ahead; `speed` seconds of video are generated in a second, as far as is known. */
  next(ready, speed) {
    const able = clamp(speed || 1, 0.2, 1);
    // Blocks come whole, so about one of them should lie ahead on average; a fast model needs less.
    const target = able < 1 ? this.block : this.block / 3;
    const wanted = Math.min(1, able * clamp(ready / target, 0.55, able < 1 ? 1.3 : 1));
    this.rate += (wanted - this.rate) * 0.15;
    return this.rate > 0.985 ? 1 : Math.round(this.rate * 50) / 50;
  }
}
