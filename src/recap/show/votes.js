"use strict";
// The votes of a study: kept in this browser line by line, and sent to a server where there is one. study.js has the rest.
// What a vote is, and how its checksum is made, is in recap/eval/study/votes.py.
const study = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const PLACE = `recap-study-${study.digest}`;
const onServer = location.protocol.startsWith("http");

let kept = { now: "", sessions: {} };
let server = null;

function load() {
  try {
    kept = JSON.parse(localStorage.getItem(PLACE)) ?? kept;
  } catch {
    // No storage in this browser, or nothing of ours in it.
  }
}

function store() {
  try {
    localStorage.setItem(PLACE, JSON.stringify(kept));
  } catch {
    showNotice("This browser keeps nothing: do not close or reload this page before you have saved the votes.");
  }
}

const current = () => kept.sessions[kept.now];

function crc32(text, start) {
  let crc = ~start;
  for (const byte of new TextEncoder().encode(text)) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc >>> 0;
}

function sealed(record, before) {
  const body = JSON.stringify(record).slice(0, -1);
  const check = crc32(body, crc32(before, 0)).toString(16).padStart(8, "0");
  return `${body},"check":"${check}"}`;
}

function append(session, fields) {
  const own = kept.sessions[session];
  const before = own.lines.length ? JSON.parse(own.lines.at(-1)).check : study.digest;
  const head = { v: 1, study: study.digest, session, n: own.lines.length };
  own.lines.push(sealed({ ...head, ...fields }, before));
  store();
}

function answersOf(own) {
  const found = {};
  for (const line of own.lines.slice(1)) {
    const vote = JSON.parse(line);
    found[vote.trial] = vote.answers;
  }
  return found;
}

let sending = Promise.resolve();

function send() {
  // One after the other, so that lines arrive in their order.
  sending = sending.then(() => sendNow());
  return sending;
}

async function sendNow(again = false) {
  const own = current();
  if (!server || !own || own.sent >= own.lines.length) return "";
  // A few at a time: the server takes so many bytes.
  const end = Math.min(own.lines.length, own.sent + 50);
  let answer;
  try {
    answer = await fetch("v1/votes", { method: "POST", body: own.lines.slice(own.sent, end).join("\n") });
  } catch {
    return "The server cannot be reached.";
  }
  if (!answer.ok && own.sent && !again) {
    // Perhaps it keeps its votes in another file now; what it has already it takes no second time.
    own.sent = 0;
    return sendNow(true);
  }
  if (!answer.ok) return (await answer.json().catch(() => ({}))).text ?? `The server answers ${answer.status}.`;
  own.sent = end;
  store();
  return end < own.lines.length ? sendNow(again) : "";
}

async function findServer() {
  if (!onServer) return;
  try {
    const answer = await fetch("v1/study");
    const found = answer.ok ? await answer.json() : {};
    if (found.study === study.digest) server = found;
  } catch {
    // A plain file server: votes are saved as a file.
  }
}
