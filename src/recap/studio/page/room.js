// What a viewer can do with a session: direct it, branch, edit its memory, keep things.
import { byId, make } from "./dom.js";
import { pointAt, showPicked, showShelf } from "./memory.js";
import { address, request } from "./net.js";
import { attempt, notice } from "./notices.js";
import { View } from "./view.js";

const refusePrompt = (words) => { byId("prompt-refused").textContent = words; };

export class Room extends View {
  async prompt(text) {
    const fields = { text, cut: byId("cut").checked, reread: byId("reread").checked, playhead_s: this.second };
    if (byId("later").checked) {
      fields.at_s = +byId("at").value;
      if (await attempt(() => this.stream.ask("prompt", fields), refusePrompt)) this.clearPrompt();
      return;
    }
    const at = performance.now();
    // The video plays on while the command is sent: what comes after this block must not be shown any more.
    fields.playhead_s = this.second + 0.06;
    const now = this.lead.blockAt(Math.max(fields.playhead_s, this.seen));
    if (now !== undefined) this.players.forEach((player) => player.hold(now + 1));
    byId("direct").classList.add("sending");
    const done = await attempt(() => this.stream.ask("prompt", fields), refusePrompt);
    byId("direct").classList.remove("sending");
    this.players.forEach((player) => player.release());
    if (!done) return;
    this.sent = { at, second: done.second ?? this.withSeconds().find((cue) => cue.block === done.block)?.second ?? this.nextUnseen() };
    this.clearPrompt();
    if (this.second < this.sent.second - 2 * this.about.block_s) this.sent = null;
    if (!this.playing) this.setPlaying(true);
  }

  clearPrompt() {
    byId("prompt-text").value = "";
    byId("cut").checked = byId("reread").checked = byId("later").checked = false;
    byId("at").disabled = true;
  }

  schedule(second) {
    byId("later").checked = true;
    byId("at").disabled = false;
    byId("at").value = second.toFixed(2);
    byId("prompt-text").focus();
  }

  async branchHere() {
    const second = this.second;
    this.goal = second;
    const done = await attempt(() => this.stream.ask("branch", { second }));
    if (done) notice("A new branch begins with the next block. The other one stays: click it under the timeline to return.");
    else this.goal = undefined;
  }

  async switchTo(branch) {
    if (branch === this.branch) return;
    this.goal = this.second;
    if (!(await attempt(() => this.stream.ask("switch", { branch })))) this.goal = undefined;
  }

  pick(group, canvas) {
    if (!group) this.wall.unpick();
    showPicked(byId("picked"), group, canvas, (what, picked, name) => this.act(what, picked, name));
  }

  async act(what, group, name) {
    const slots = group.map((patch) => patch.slot);
    if (what === "see") {
      this.setPlaying(false);
      this.seek(group[0].second + 0.01);
      pointAt(this.screens[this.watched].querySelector(".screen"), group, this.shape);
      return;
    }
    if (this.watched > 0 && what !== "save") {
      notice("Only the first of two memories can be edited: the other one is there to compare.");
      return;
    }
    if ((what === "save" || what === "pin") && !name) {
      byId("pick-name").focus();
      notice("Give it a name first: prompts call it @name.");
      return;
    }
    if (what === "save") { await this.save(slots, name); return; }
    const fields = what === "pin" ? { slots, name } : { slots }, info = this.infoAt(this.second);
    if (await attempt(() => this.stream.ask(what, { ...fields, block: info?.index, playhead_s: this.second }))) {
      // The next block shows it anyway; while the video is paused there is none.
      if (info?.bank) info.bank = info.bank.filter((patch) => !slots.includes(patch.slot));
      this.shown = null;
      notice(what === "pin" ? `Pinned as @${name}: nothing evicts it.` : "Forgotten, from the next block on.");
      this.pick(null);
    }
  }

  async save(slots, name) {
    const body = { name, slots, track: this.state.tracks[this.watched].name, block: this.infoAt(this.second)?.index };
    if (await attempt(() => request(`${this.base}/casts`, { method: "POST", body }))) {
      notice(`Saved as @${name}. Use it here or in another video.`);
      this.drawShelf();
    }
  }

  async drawShelf() {
    const found = await attempt(() => request("/casts"));
    if (!found) return;
    showShelf(byId("shelf"), found.casts ?? found, this.cast ?? [], {
      join: (name) => attempt(() => this.stream.ask("cast", { name, playhead_s: this.second })),
      leave: (name) => attempt(() => this.stream.ask("drop_cast", { name, playhead_s: this.second })),
      remove: (name) => attempt(async () => { await request(`/casts/${encodeURIComponent(name)}`, { method: "DELETE" }); this.drawShelf(); }),
      download: (name) => address(`/casts/${encodeURIComponent(name)}.cast`),
    });
  }

  keepMenu() {
    const tracks = this.state.tracks;
    byId("keep").replaceChildren(
      ...tracks.map((track) => make("a", { href: address(`${this.base}/video.mp4?track=${encodeURIComponent(track.name)}&branch=${encodeURIComponent(this.branch)}`), download: `${this.id}.mp4` },
        make("b", {}, tracks.length > 1 ? `Video, ${track.memory ?? track.name}` : "Video"), make("span", {}, "MP4, this branch"))),
      make("button", { type: "button", onclick: () => this.downloadRun() }, make("b", {}, "Run folder"), make("span", {}, "ZIP, for recap generate --resume")),
      make("button", { type: "button", onclick: () => attempt(() => navigator.clipboard.writeText(location.href).then(() => notice("The address is copied: it opens this session."))) },
        make("b", {}, "Address"), make("span", {}, "watch in another tab")),
    );
  }

  /** Fetched first, because a run folder may be refused, and the page should show that. */
  async downloadRun() {
    const bytes = await attempt(() => request(`${this.base}/run.zip`, { raw: true }));
    if (!bytes) return;
    const link = make("a", { href: URL.createObjectURL(new Blob([bytes], { type: "application/zip" })), download: `${this.id}.zip` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
}
