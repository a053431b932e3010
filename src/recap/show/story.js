// Plays the videos of every story together, from just before its return; the first video leads.
const STRAY_S = 0.08;
const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;

function playStory(section, story) {
  const figures = [...section.querySelectorAll("figure")];
  const videos = figures.map((figure) => figure.querySelector("video")), lead = videos[0];
  const stop = section.querySelector(".stop"), track = section.querySelector(".strip div");
  const scenes = [...track.querySelectorAll("button")], head = track.querySelector("i");
  let wanted = !calm, visible = true;

  const seek = (second) => { for (const video of videos) video.currentTime = second; };
  function run() {
    for (const video of videos) {
      if (wanted && visible) video.play().catch(() => {});
      else video.pause();
    }
    stop.textContent = wanted ? "Pause" : "Play";
  }
  function follow() {
    const now = lead.currentTime;
    head.style.left = 100 * Math.min(1, now / story.duration) + "%";
    const scene = story.scenes.filter((start) => start <= now + 0.01).length - 1;
    scenes.forEach((button, i) => button.setAttribute("aria-current", i === scene));
    for (const video of videos) {
      if (video !== lead && !video.seeking && Math.abs(video.currentTime - now) > STRAY_S) video.currentTime = now;
    }
    requestAnimationFrame(follow);
  }
  scenes.forEach((button, i) => {
    const end = i + 1 < story.scenes.length ? story.scenes[i + 1] : story.duration;
    button.style.flex = `${end - story.scenes[i]} 1 0`;
    button.addEventListener("click", () => seek(story.scenes[i] + 0.01));
  });
  stop.addEventListener("click", () => { wanted = !wanted; run(); });
  // A phone decodes few videos at once: those out of sight rest.
  new IntersectionObserver(([entry]) => { visible = entry.isIntersecting; run(); }).observe(section);

  // Of the videos, those with a bank have a wall each, in the same order.
  const owners = figures.filter((_, i) => story.banks[i]), banks = story.banks.filter(Boolean);
  section.querySelectorAll(".wall").forEach((wall, i) => {
    const show = hangWall(wall, null, banks[i], (picked) => {
      const [second, , row, column] = banks[i].patches[picked];
      wanted = false;
      run();
      seek(second + 0.001);
      pointAt(owners[i].querySelector(".spot"), owners[i].querySelector("video"), story.grid, row, column);
    }, 20);
    show(true);
  });
  const begin = () => { seek(story.start); run(); };
  if (lead.readyState >= 1) begin();
  else lead.addEventListener("loadedmetadata", begin, { once: true });
  follow();
}

document.querySelectorAll(".story").forEach((section, i) => playStory(section, data[i]));
