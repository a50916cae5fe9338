/* Gradio's page loader leaves a clock behind that asks for every frame to be drawn, sixty a second
   for as long as the page is open. Once a second is enough for a clock: for what counts seconds and
   is not told the time, as what moves is. */
{
  const ask = window.requestAnimationFrame.bind(window);
  const drop = window.cancelAnimationFrame.bind(window);
  const clocks = new Map();
  let last = 0;
  const isClock = (draw) =>
    draw?.length === 0 && /performance\.now\(\)\s*-[^;]*\/\s*(1e3|1000)\b/.test(draw);
  window.requestAnimationFrame = (draw) => {
    if (!isClock(draw)) return ask(draw);
    const id = --last; // below zero, where no frame's own is
    const timer = window.setTimeout(() => {
      const frame = ask((now) => {
        clocks.delete(id);
        draw(now);
      });
      clocks.set(id, () => drop(frame));
    }, 1000);
    clocks.set(id, () => window.clearTimeout(timer));
    return id;
  };
  window.cancelAnimationFrame = (id) => {
    const end = clocks.get(id) ?? (() => drop(id));
    clocks.delete(id);
    end();
  };
}
