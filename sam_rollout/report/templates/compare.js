// Shows, next to the pointer, the text of the element that is pointed at or touched.
const tip = document.getElementById("tip");
function show(event) {
  const told = event.target.closest && event.target.closest("[data-tip]");
  tip.hidden = !told;
  if (!told) return;
  tip.textContent = told.dataset.tip;
  const wide = tip.offsetWidth, room = document.documentElement.clientWidth;
  tip.style.left = Math.max(8, Math.min(event.clientX + 12, room - wide - 8)) + "px";
  tip.style.top = event.clientY - tip.offsetHeight - 12 + "px";
}
document.addEventListener("pointermove", show);
document.addEventListener("pointerdown", show);
