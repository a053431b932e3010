"use strict";
// The page of a study: pairs of videos in sync, and answers. votes.js, which comes first, keeps the votes.
const videos = [...document.querySelectorAll("video")];
const SAME = "tie";

// The player: both videos run by one clock.
let playing = false;
let shown = null;
const blobs = new Map();

async function source(file) {
  const path = `videos/${file}`;
  if (!onServer) return path;
  // Whole files: the two never wait for each other, and any server will do, also one that cannot seek.
  if (!blobs.has(file)) {
    blobs.set(file, fetch(path).then(async (answer) => {
      if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
      return URL.createObjectURL(await answer.blob());
    }));
  }
  return blobs.get(file);
}

function keepOnly(files) {
  for (const [file, url] of blobs) {
    if (files.has(file)) continue;
    blobs.delete(file);
    url.then((made) => URL.revokeObjectURL(made), () => {});
  }
}

function sidesOf(place) {
  const [pair, swapped] = study.sheets[current().sheet][place];
  const [first, second] = study.pairs[pair];
  return swapped ? [second, first] : [first, second];
}

function ready(video, url) {
  return new Promise((done, fail) => {
    video.oncanplaythrough = () => done();
    // Some telephones load no more than the beginning before play is pressed.
    video.onloadedmetadata = () => setTimeout(done, 1500);
    video.onerror = () => fail(new Error(`a video cannot be played (${video.error?.message ?? "no reason given"})`));
    video.src = url;
  });
}

const length = () => Math.min(...videos.map((video) => video.duration || Infinity));

function play(wanted) {
  playing = wanted;
  for (const video of videos) {
    video.playbackRate = 1;
    // A telephone that saves power waits for the button; that another pair came meanwhile is no reason to stop.
    if (wanted) video.play().catch((error) => error.name === "NotAllowedError" && play(false));
    else video.pause();
  }
  $("toggle").textContent = wanted ? "❚❚" : "▶";
}

function seek(second) {
  for (const video of videos) video.currentTime = second;
}

function watch() {
  const [a, b] = videos;
  if (shown && isFinite(length())) {
    if (playing && (a.ended || b.ended)) {
      seek(0);
      play(true);
    } else if (playing && !a.seeking && !b.seeking) {
      const ahead = b.currentTime - a.currentTime;
      // A small difference is played away, a large one is jumped over.
      if (Math.abs(ahead) > 0.25) b.currentTime = a.currentTime;
      else b.playbackRate = Math.abs(ahead) > 0.02 ? 1 - Math.max(-0.1, Math.min(0.1, ahead)) : 1;
    }
    const total = length();
    $("clock").textContent = `${a.currentTime.toFixed(1)} of ${total.toFixed(1)} s`;
    if (document.activeElement !== $("seek") || playing) $("seek").value = a.currentTime / total;
    if (!shown.watched) {
      let seen = 0;
      for (let i = 0; i < a.played.length; i++) seen += a.played.end(i) - a.played.start(i);
      shown.left = Math.max(0, 0.97 * total - seen);
      shown.watched = shown.left === 0;
      enable();
    }
  }
  requestAnimationFrame(watch);
}

// Trials.
async function show(place) {
  const own = current();
  if (place >= study.sheets[own.sheet].length) return finish();
  const before = answersOf(own)[place];
  shown = { place, answers: { ...before }, watched: Boolean(before), left: Infinity, since: performance.now(), at: 0 };
  play(false);
  delete $("trial").dataset.shown;
  reveal("trial");
  $("next").disabled = true;
  $("hint").textContent = "Loading the videos …";
  drawQuestions();
  const files = sidesOf(place);
  const later = place + 1 < study.sheets[own.sheet].length ? sidesOf(place + 1) : [];
  keepOnly(new Set([...files, ...later]));
  try {
    const urls = await Promise.all(files.map(source));
    await Promise.all(videos.map((video, i) => ready(video, urls[i])));
  } catch (error) {
    blobs.clear();
    showNotice(`This pair cannot be shown: ${error.message}. Reload the page; nothing is lost.`);
    return;
  }
  if (shown?.place !== place) return;
  later.forEach((file) => source(file).catch(() => {}));
  shown.since = performance.now();
  $("trial").dataset.shown = place + 1;
  seek(0);
  play(true);
  enable();
}

function drawQuestions() {
  const names = { A: "A", [SAME]: "Hard to say", B: "B" };
  $("questions").replaceChildren(...study.questions.map(([id, text], index) => {
    const field = document.createElement("fieldset");
    field.className = "question";
    field.dataset.question = id;
    const legend = document.createElement("legend");
    legend.textContent = text;
    const row = document.createElement("div");
    row.className = "answers";
    for (const [answer, label] of Object.entries(names)) {
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.answer = answer;
      button.textContent = label;
      button.onclick = (event) => {
        // After a click the space bar belongs to the player again.
        if (event.detail) button.blur();
        choose(index, answer);
      };
      row.append(button);
    }
    field.append(legend, row);
    return field;
  }));
  mark();
}

function choose(index, answer) {
  // No answer to a pair that is not on the screen yet.
  if (!$("trial").dataset.shown) return;
  shown.answers[study.questions[index][0]] = answer;
  const open = study.questions.findIndex(([id]) => !shown.answers[id]);
  shown.at = index + 1 < study.questions.length ? index + 1 : open < 0 ? index : open;
  mark();
  enable();
}

function mark() {
  document.querySelectorAll(".question").forEach((field, index) => {
    field.classList.toggle("current", index === shown.at);
    for (const button of field.querySelectorAll("button"))
      button.setAttribute("aria-pressed", String(shown.answers[field.dataset.question] === button.dataset.answer));
  });
}

function enable() {
  const open = study.questions.filter(([id]) => !shown.answers[id]).length;
  $("next").disabled = open > 0 || !shown.watched;
  $("back").disabled = shown.place === 0;
  const words = [];
  if (!shown.watched) words.push(isFinite(shown.left) ? `${shown.left.toFixed(0)} s still to watch` : "Watch both to the end");
  if (open) words.push(open === 1 ? "1 answer is missing" : `${open} answers are missing`);
  $("hint").textContent = words.join(", ");
}

function next() {
  if ($("next").disabled) return;
  const length = current().lines.length;
  load();
  if (!current() || current().lines.length !== length) {
    showNotice("You continued in another window: this one follows it.");
    resume();
    return;
  }
  const before = answersOf(current())[shown.place];
  if (!before || study.questions.some(([id]) => before[id] !== shown.answers[id])) {
    const answers = Object.fromEntries(study.questions.map(([id]) => [id, shown.answers[id]]));
    const took = Math.min(1e6, Math.round((performance.now() - shown.since) / 100) / 10);
    append(kept.now, { trial: shown.place, answers, took_s: took });
  }
  send().then((problem) => problem && showNotice(`${problem} Your votes are kept in this browser; save them at the end.`));
  show(shown.place + 1);
}

async function finish() {
  play(false);
  shown = null;
  reveal("end");
  $("send").hidden = !server;
  $("outcome").textContent = "…";
  const problem = await send();
  const own = current();
  if (server && !problem) $("outcome").textContent = `All ${study.sheets[own.sheet].length} pairs are answered, and the votes have arrived. You can close this page.`;
  else if (server) $("outcome").textContent = `The votes have not arrived: ${problem} Save them as a file and send it to whoever asked you, or try again.`;
  else $("outcome").textContent = "One step is left: save the votes as a file and send it to whoever asked you.";
}

function download() {
  const own = current();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([own.lines.join("\n") + "\n"], { type: "application/x-ndjson" }));
  link.download = `votes-${own.rater.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 30)}-${kept.now.slice(0, 6)}.jsonl`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function showNotice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function reveal(name) {
  for (const id of ["start", "trial", "end"]) $(id).hidden = id !== name;
  const own = current();
  $("other").hidden = name === "start";
  const total = study.sheets[0].length;
  $("who").textContent = name === "trial" ? `${own.rater}: pair ${shown.place + 1} of ${total}` : "";
  window.scrollTo(0, 0);
}

async function begin(event) {
  event.preventDefault();
  const rater = $("name").value.trim().normalize();
  if (!rater) return;
  const bytes = crypto.getRandomValues(new Uint8Array(20));
  const hex = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const session = hex.slice(0, 32);
  const sheet = server?.sheet ?? parseInt(hex.slice(32), 16) % study.sheets.length;
  kept.sessions[session] = { rater, sheet, lines: [], sent: 0 };
  const former = kept.now;
  kept.now = session;
  append(session, { rater, sheet, at: new Date().toISOString() });
  const problem = await send();
  if (problem && current().sent === 0 && server && !problem.startsWith("The server")) {
    // Refused, mostly because another rater has this name: nothing was answered under it yet.
    delete kept.sessions[session];
    kept.now = former;
    store();
    showNotice(problem);
    return;
  }
  showNotice("");
  show(0);
}

function resume() {
  const answers = answersOf(current());
  let place = 0;
  while (answers[place]) place++;
  show(place);
}

function start() {
  $("name").value = "";
  $("count").textContent = study.sheets[0].length;
  $("asked").replaceChildren(...study.questions.map(([, text]) => Object.assign(document.createElement("li"), { textContent: text })));
  $("where").textContent = server
    ? "Your answers go to the server of this page and nowhere else."
    : "Your answers stay in this browser until you save them as a file.";
  // Whoever took part in this browser before can go on, or save votes.
  $("former").replaceChildren(...Object.entries(kept.sessions).map(([session, own]) => {
    const button = document.createElement("button");
    button.type = "button";
    const done = Object.keys(answersOf(own)).length;
    button.textContent = `Continue as ${own.rater} (${done} of ${study.sheets[0].length})`;
    button.onclick = () => { kept.now = session; store(); showNotice(""); resume(); };
    return button;
  }));
  reveal("start");
}

function press(event) {
  if (!shown || event.ctrlKey || event.metaKey || event.altKey) return;
  const button = event.target.closest?.("button");
  if (event.key === " " || event.key === "Enter") {
    if (button) return;
    event.preventDefault();
    if (event.key === " ") play(!playing);
    else next();
    return;
  }
  const answer = { ArrowLeft: "A", ArrowRight: "B", ArrowDown: SAME, 1: "A", 2: SAME, 3: "B" }[event.key];
  if (answer && event.target.type !== "range") {
    event.preventDefault();
    choose(shown.at, answer);
  } else if (event.key === "ArrowUp" && event.target.type !== "range") {
    event.preventDefault();
    shown.at = Math.max(0, shown.at - 1);
    mark();
  } else if (event.key === "r" || event.key === "R") {
    seek(0);
    play(true);
  }
}

$("start").onsubmit = begin;
$("toggle").onclick = (event) => { if (event.detail) $("toggle").blur(); play(!playing); };
$("seek").oninput = () => { play(false); seek($("seek").value * length()); };
$("back").onclick = () => show(shown.place - 1);
$("next").onclick = next;
$("save").onclick = download;
$("send").onclick = finish;
$("review").onclick = () => show(study.sheets[0].length - 1);
$("other").onclick = () => { play(false); shown = null; kept.now = ""; store(); start(); };
document.addEventListener("keydown", press);
document.addEventListener("visibilitychange", () => { if (document.hidden && playing) play(false); });

load();
findServer().then(() => {
  if (current()) {
    send();
    resume();
  } else start();
  watch();
});
