const times = JSON.parse(document.getElementById("times").textContent);

for (const cell of document.querySelectorAll("[data-ms]")) {
  const [phase, name] = cell.dataset.ms.split(" ");
  const ms = times.pass_ms[phase][name];
  cell.textContent = ms === undefined ? "" : ms.toFixed(ms < 10 ? 1 : 0);
}
const parts = Object.entries(times.seconds).map(([part, s]) => `${part} ${s.toFixed(1)} s`);
document.getElementById("compiled").textContent = `Compiled in: ${parts.join(", ")}.`;

function showTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  const inner = target.matches("li") ? target.querySelector("details") : target;
  for (let at = inner; at; at = at.parentElement) if (at.matches("details")) at.open = true;
  target.scrollIntoView();
}
addEventListener("hashchange", showTarget);
showTarget();

for (const button of document.querySelectorAll("[data-open], [data-close]")) {
  const open = "open" in button.dataset;
  button.addEventListener("click", () => {
    const area = document.getElementById(button.dataset[open ? "open" : "close"]);
    for (const details of area.querySelectorAll("details")) details.open = open;
  });
}
