/* The list of conversations: one stop of the Tab key, through which arrows go; the menu of a row; and
   what is asked there, handed to hidden buttons that gradio knows. */
{
  const field = (id) => document.querySelector(`#${id} :is(textarea, input)`);
  const list = () => document.getElementById("listing");
  let row = null; // whose menu is open
  let held = null; // the button of a row that has the focus

  const act = (what, id, name = "") => {
    for (const [each, value] of [["row", id], ["row-name", name]]) {
      field(each).value = value;
      field(each).dispatchEvent(new Event("input"));
    }
    setTimeout(() => document.getElementById(`row-${what}`).click());
  };

  // The list is drawn again whenever an answer begins or ends: the focus stays where it was.
  document.addEventListener("focusin", ({ target }) => {
    held = target.closest("#listing li > button");
  });
  document.addEventListener("focusout", ({ target }) => {
    if (target.isConnected) held = null;
  });
  const keepFocus = () => {
    if (!held || held.isConnected) return;
    const { id } = held.parentElement.dataset;
    list().querySelector(`li[data-id="${id}"] > .${held.className}`)?.focus();
  };

  const mark = () => {
    const rows = [...(list()?.querySelectorAll("li") ?? [])];
    const here = rows.find((each) => each.dataset.id === field("here")?.value);
    for (const each of rows) {
      const [open, more] = each.children, stop = each === (here ?? rows[0]) ? 0 : -1;
      open.tabIndex = more.tabIndex = stop;
      if (each === here) open.setAttribute("aria-current", "true");
      else open.removeAttribute("aria-current");
    }
    keepFocus();
  };
  document.addEventListener("kvlite:shown", mark);
  addEventListener("DOMContentLoaded", () => {
    const found = new MutationObserver(() => {
      if (!list()) return;
      found.disconnect();
      new MutationObserver(mark).observe(list(), { childList: true, subtree: true });
      mark();
    });
    found.observe(document.body, { childList: true, subtree: true });
  });

  const openMenu = (more) => {
    const menu = document.getElementById("row-menu"), at = more.getBoundingClientRect();
    row = more.parentElement;
    menu.showPopover();
    menu.style.left = `${Math.max(8, Math.min(at.left, innerWidth - menu.offsetWidth - 8))}px`;
    const below = at.bottom + menu.offsetHeight + 8 < innerHeight;
    menu.style.top = `${below ? at.bottom + 2 : at.top - menu.offsetHeight - 2}px`;
    menu.firstElementChild.focus();
  };

  const openRename = () => {
    const dialog = document.getElementById("rename"), name = dialog.querySelector("input");
    name.value = row.querySelector(".open span").textContent;
    dialog.returnValue = "";
    dialog.onclose = () => {
      if (dialog.returnValue) act("rename", row.dataset.id, name.value);
    };
    dialog.showModal();
    name.select();
  };

  document.addEventListener("click", (event) => {
    if (event.target.matches?.("#rename [type=button]")) document.getElementById("rename").close();
    const at = event.target.closest?.("#listing button, #row-menu button");
    if (!at) return;
    const { id } = at.closest("li")?.dataset ?? {};
    if (at.className === "open") act("open", id);
    else if (at.className === "more") openMenu(at);
    else if (at.dataset.do === "restore") act("restore", at.dataset.id);
    else {
      document.getElementById("row-menu").hidePopover();
      if (at.dataset.do === "rename") openRename();
      else act(at.dataset.do, row.dataset.id);
    }
  });

  document.addEventListener("keydown", (event) => {
    const menu = event.target.closest?.("#row-menu");
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const at = event.target.closest?.("#row-menu button, #listing li > button");
    if (menu && event.key === "Tab") menu.hidePopover();
    if (!at || !step) return;
    const among = menu ? "#row-menu button" : `#listing li > .${at.className}`;
    const all = [...document.querySelectorAll(among)];
    all[Math.min(all.length - 1, Math.max(0, all.indexOf(at) + step))].focus();
    event.preventDefault();
  });
}
