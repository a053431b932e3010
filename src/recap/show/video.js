// Plays the videos of a page together, and draws the plots that follow them.
const videos = [...document.querySelectorAll(".screen video")], spots = [...document.querySelectorAll(".screen .spot")];
const methods = data.methods, lead = videos[0], scrubber = byId("scrubber"), play = byId("play");
const escaped = (text) => { const b = document.createElement("b"); b.textContent = text; return b.innerHTML; };
const colour = (i) => `var(--m${i})`;
const chip = (paint, name) => `<i class="chip" style="background:${paint}"></i>${escaped(name)}`;
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));

// --- one clock for all videos: the first one leads, the others are pulled along where they stray
const STRAY_S = 0.08;
let playing = false, goal = 0; // goal: where the videos stand or are on their way to, while they do not play
const now = () => (playing ? lead.currentTime : goal);

function seekAll(second) {
  goal = clamp(second, 0, data.duration - 0.01);
  for (const video of videos) video.currentTime = goal;
  render();
}
function setPlaying(wanted) {
  if (wanted && now() > data.duration - 0.1) seekAll(0);
  goal = now();
  playing = wanted;
  for (const video of videos) {
    if (wanted) video.play().catch(() => setPlaying(false));
    else { video.pause(); video.currentTime = goal; }
  }
  play.setAttribute("aria-label", wanted ? "Pause" : "Play");
  play.innerHTML = `<svg viewBox="0 0 18 18"><path d="${wanted ? "M3 1h4v16H3zM11 1h4v16h-4z" : "M4 1l13 8-13 8z"}"/></svg>`;
  if (wanted) requestAnimationFrame(tick);
}
function stopAt(second) { setPlaying(false); seekAll(second); }
function tick() {
  if (!playing) return;
  if (lead.ended || lead.currentTime > data.duration - 0.01) { seekAll(0); setPlaying(true); return; }
  for (const video of videos) {
    if (video !== lead && !video.seeking && Math.abs(video.currentTime - lead.currentTime) > STRAY_S) {
      video.currentTime = lead.currentTime;
    }
    if (video.paused && !video.ended) video.play().catch(() => {});
  }
  render();
  requestAnimationFrame(tick);
}
play.addEventListener("click", () => setPlaying(!playing));
for (const video of videos) video.addEventListener("dblclick", () => video.requestFullscreen());
scrubber.max = data.duration;
scrubber.addEventListener("input", () => stopAt(+scrubber.value));
addEventListener("keydown", (event) => {
  if (event.key === " " && !event.target.closest("button, input")) { event.preventDefault(); setPlaying(!playing); }
  if (["ArrowLeft", "ArrowRight"].includes(event.key) && event.target !== scrubber) {
    stopAt(now() + (event.key === "ArrowLeft" ? -1 : 1) * (event.shiftKey ? 1 : 0.25));
  }
});

// --- the script
const endsOf = (starts) => starts.map((_, i) => (i + 1 < starts.length ? starts[i + 1] : data.duration));
const sceneStarts = data.scenes.map(([start]) => start), sceneEnds = endsOf(sceneStarts);
byId("scenes").append(...data.scenes.map(([start, prompt, cut], i) => {
  const button = document.createElement("button");
  button.textContent = prompt;
  button.title = `${start.toFixed(1)} s: ${prompt}${cut ? " (a cut: the prior was dropped)" : ""}`;
  button.style.flex = `${sceneEnds[i] - start} 1 0`;
  if (cut) button.className = "cut";
  button.addEventListener("click", () => stopAt(start));
  return button;
}));
byId("prompt").hidden = data.scenes.length <= 1;

// --- plots
const LEFT = 40, RIGHT = 10, TOP = 8, BOTTOM = 20;
const followers = []; // of every plot, what moves with the videos
const lastAt = (starts, second) => { let i = 0; while (i + 1 < starts.length && starts[i + 1] <= second + 1e-6) i++; return i; };

function niceCeil(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((lead) => lead * power).find((x) => x >= value - 1e-9);
}
function addPlot(parent, title, about) {
  const plot = document.createElement("div");
  plot.className = "plot";
  plot.innerHTML = `<h3>${title}</h3><p>${escaped(about)}</p><div class="values"></div><div class="host"></div>`;
  parent.append(plot);
  return { values: plot.querySelector(".values"), host: plot.querySelector(".host") };
}
function frameChart(host, height, top, unit) {
  const width = Math.max(220, host.clientWidth);
  const x = (second) => LEFT + (width - LEFT - RIGHT) * clamp(second / data.duration, 0, 1);
  const y = (value) => TOP + (height - TOP - BOTTOM) * (1 - clamp(value / top, 0, 1));
  const step = [0.5, 1, 2, 5, 10, 30, 60, 120, 300].find((s) => data.duration / s <= width / 62) || data.duration / 8;
  const marks = [0, top / 2, top].map((value) =>
    `<line class="rule" x1="${LEFT}" x2="${width - RIGHT}" y1="${y(value)}" y2="${y(value)}"/>` +
    `<text x="${LEFT - 7}" y="${y(value) + 4}" text-anchor="end">${unit(value)}</text>`);
  for (let s = 0; s <= data.duration + 1e-6; s += step) {
    marks.push(`<text x="${x(s)}" y="${height - 4}" text-anchor="${s ? "middle" : "start"}">${+s.toFixed(1)} s</text>`);
  }
  const shots = sceneStarts.slice(1).map((start) =>
    `<line class="scene" stroke-dasharray="2 4" x1="${x(start)}" x2="${x(start)}" y1="${TOP}" y2="${height - BOTTOM}"/>`);
  const draw = (inside) => {
    host.innerHTML = `<svg class="chart" viewBox="0 0 ${width} ${height}" role="img">${marks.join("")}${inside}` +
      `${shots.join("")}<line class="playhead" y1="${TOP}" y2="${height - BOTTOM}"/></svg>`;
    const svg = host.firstChild, head = svg.querySelector(".playhead");
    svg.addEventListener("click", (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width * width - LEFT) / (width - LEFT - RIGHT);
      stopAt(clamp(at, 0, 1) * data.duration);
    });
    return () => { head.setAttribute("x1", x(now())); head.setAttribute("x2", x(now())); };
  };
  return { x, y, draw };
}
// rows: [{name, colour, value}], value being text
const readout = (rows) => rows.map((row) =>
  `<span>${chip(row.colour, row.name)} <b>${row.value}</b></span>`).join("");

// plot.values: a list per method, null where it has none; plot.steps: a value lasts until the next one begins
function lineChart(plot, { values, host }) {
  const shown = methods.map((method, i) => ({ method, i, points: plot.values[i] })).filter(({ points }) => points);
  const top = plot.top || niceCeil(Math.max(plot.digits ? 1e-3 : 4, ...shown.flatMap(({ points }) => points)));
  const { x, y, draw } = frameChart(host, 190, top, (v) => +v.toFixed(3)), ends = endsOf(plot.starts_s);
  const follow = draw(shown.map(({ points, i }) => {
    let pen = false; // down: the line continues from the value before
    const path = points.map((value, k) => {
      if (value === null) { pen = false; return ""; }
      const lead = pen ? "L" : "M", height = y(value).toFixed(1);
      // A value between two gaps is a dot; round ends make a line of no length one.
      const dot = !plot.steps && !pen && (k + 1 === points.length || points[k + 1] === null);
      pen = true;
      return `${lead}${x(plot.starts_s[k]).toFixed(1)} ${height}` +
        (plot.steps ? `L${x(ends[k]).toFixed(1)} ${height}` : dot ? "h0" : "");
    });
    return `<path class="line" style="stroke:${colour(i)}" d="${path.join("")}"/>`;
  }).join(""));
  followers.push(() => {
    follow();
    const at = lastAt(plot.starts_s, now());
    values.innerHTML = readout(shown.map(({ method, i, points }) => {
      const value = points[Math.min(at, points.length - 1)];
      return { name: method.name, colour: colour(i), value: value === null ? "–" : value.toFixed(plot.digits) };
    }));
  });
}

// The shares of attention by role, one on top of the other.
function areaChart(method, { values, host }) {
  const { x, y, draw } = frameChart(host, 150, 1, (v) => Math.round(100 * v) + "%");
  const roles = data.roles.filter((role) => method.shares.some((share) => share[role]));
  const below = method.shares.map(() => 0), ends = endsOf(data.blocks);
  const side = (from, to, k) => `${x(from[k]).toFixed(1)} ${y(below[k]).toFixed(1)}L${x(to[k]).toFixed(1)} ${y(below[k]).toFixed(1)}`;
  const areas = roles.map((role) => {
    const floor = below.map((_, k) => side(ends, data.blocks, k)).reverse();
    method.shares.forEach((share, k) => { below[k] += share[role] || 0; });
    return `<path style="fill:var(--${role})" d="M${below.map((_, k) => side(data.blocks, ends, k)).join("L")}L${floor.join("L")}Z"/>`;
  });
  const follow = draw(areas.join(""));
  followers.push(() => {
    follow();
    const share = method.shares[lastAt(data.blocks, now())];
    values.innerHTML = readout(roles.map((role) =>
      ({ name: role, colour: `var(--${role})`, value: Math.round(100 * (share[role] || 0)) + "%" })));
  });
}

const cards = data.cards.filter(([, , plots]) => plots.length), attends = methods.some((method) => method.shares.length);
const plotCards = cards.map(([title, about]) => {
  const card = document.createElement("section"), head = `<h2>${escaped(title)}</h2><div class="remarks"><p>${escaped(about)}</p></div>`;
  card.className = "card";
  card.innerHTML = (title ? head : "") + '<div class="plots"></div>';
  byId("cards").append(card);
  return card.lastChild;
});
byId("attention").hidden = !attends;

function drawPlots() {
  followers.length = 0;
  document.querySelectorAll(".plots").forEach((parent) => parent.replaceChildren());
  // All plots before the first chart: their width is known only then.
  const lines = cards.flatMap(([, , plots], i) => plots.map((plot) => [plot, addPlot(plotCards[i], escaped(plot.title), plot.about)]));
  const areas = attends ? methods.map((method, i) => [method, addPlot(byId("areas"), chip(colour(i), method.name), "")]) : [];
  lines.forEach(([plot, hosts]) => lineChart(plot, hosts));
  areas.forEach(([method, hosts]) => areaChart(method, hosts));
  render();
}

// --- what could be seen in the last block
const seen = data.roles.filter((role) => methods.some((method) => role in method.tokens));
const cells = (tag, values) => values.map((value) => `<${tag}>${value}</${tag}>`).join("");
byId("tokens").innerHTML = `<tr>${cells("th", ["", ...seen, "tokens in all", "s per block"])}</tr>` + methods.map((method, i) => {
  const counts = seen.map((role) => method.tokens[role]?.toLocaleString("en") ?? "–");
  const all = Object.values(method.tokens).reduce((sum, count) => sum + count, 0).toLocaleString("en");
  return `<tr><th>${chip(colour(i), method.name)}</th>${cells("td", [...counts, all, method.block_s.toFixed(2)])}</tr>`;
}).join("");

function render() {
  const second = now(), scene = lastAt(sceneStarts, second);
  scrubber.value = second;
  byId("time").textContent = `${second.toFixed(1)} / ${data.duration.toFixed(1)} s`;
  [...byId("scenes").children].forEach((button, i) => button.setAttribute("aria-current", i === scene));
  const [, prompt, cut] = data.scenes[scene] || [0, "", false];
  byId("prompt").innerHTML = escaped(prompt) + (cut ? " <small>after a cut</small>" : "");
  for (const follow of followers) follow();
}

// --- banks
methods.forEach((method, index) => {
  if (!method.bank) return;
  const card = byId("bank").content.cloneNode(true).firstElementChild;
  card.querySelector(".whose").innerHTML = chip(colour(index), method.name);
  card.querySelector(".made-of").textContent = method.bank_about;
  byId("banks").append(card);
  const show = hangWall(card.querySelector(".wall"), card.querySelector(".quiet"), method.bank, (picked) => {
    const [second, , row, column] = method.bank.patches[picked];
    stopAt(second + 0.001);
    pointAt(spots[index], videos[index], data.grid, row, column);
    videos[index].scrollIntoView({ behavior: "smooth", block: "nearest" });
  });
  const buttons = [...card.querySelectorAll(".switch button")];
  const choose = (joined) => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", (i === 0) === joined));
    show(joined);
  };
  buttons.forEach((button, i) => button.addEventListener("click", () => choose(i === 0)));
  choose(true);
});

let resizing;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(drawPlots, 120); });
drawPlots();
setPlaying(true);
