"""What the browser does by itself with the page, as gradio runs it there."""

# On a phone what is beside the conversation would hide it.
NARROW = """() => {
  for (const id of ['conversations', 'side']) {
    const side = document.getElementById(id);
    if (innerWidth <= 768 && side?.classList.contains('open'))
      side.querySelector('.toggle-button')?.click();
  }
}"""
# What is said next belongs to the conversation that was chosen last, whenever the server hears of
# it; and on a phone the list is in the way then.
CHOSEN = """(id, ...others) => {
  const here = document.querySelector('#here textarea, #here input');
  here.value = id;
  here.dispatchEvent(new Event('input'));
  const side = document.getElementById('conversations');
  if (innerWidth <= 768 && side?.classList.contains('open'))
    side.querySelector('.toggle-button')?.click();
  return [id, ...others];
}"""
NEW = f"""(id, ...others) => {{
  const bytes = [...crypto.getRandomValues(new Uint8Array(16))];
  return ({CHOSEN})(bytes.map((each) => each.toString(16).padStart(2, '0')).join(''), ...others);
}}"""
# An account that is unfolded is chosen as well, like an answer that is clicked on; on a phone what
# it tells comes into sight.
UNFOLDED = """() => {
  const chosen = (event) => {
    const title = event.target.closest?.('#chat .thought-group > .title');
    const side = document.getElementById('side'), hidden = !side?.classList.contains('open');
    title?.closest('[data-testid=bot]')?.click();
    if (title && innerWidth <= 768 && hidden && !title.classList.contains('expanded'))
      side?.querySelector('.toggle-button')?.click();
  };
  document.addEventListener('click', chosen, true);
  document.addEventListener('keydown', (event) => event.key === 'Enter' && chosen(event), true);
}"""
# Gradio copies an answer with its account; its Markdown alone is in its label. Where an address
# is not secure there is no clipboard, and gradio copies what it has selected.
COPIED = """() => {
  let answer = null;
  document.addEventListener('click', (event) => {
    const row = event.target.closest?.('#chat .message-buttons-left')?.previousElementSibling;
    const said = [...row?.querySelectorAll('[data-testid=bot]:not(:has(.thought-group))') ?? []];
    if (!said.length) return;
    const texts = said.map((each) => each.ariaLabel.slice(each.ariaLabel.indexOf(': ') + 2));
    answer = texts.join('\\n').replaceAll('\\u2060', '');
    setTimeout(() => answer = null);
  }, true);
  const clipboard = navigator.clipboard, write = clipboard?.writeText.bind(clipboard);
  if (clipboard) clipboard.writeText = (text) => write(answer ?? text);
  document.addEventListener('copy', (event) => {
    if (answer === null) return;
    event.clipboardData.setData('text/plain', answer);
    event.preventDefault();
  });
}"""
# A document that is opened at a passage shows that passage.
OPENED = """() => document.addEventListener('toggle', (event) => {
  const box = event.target.querySelector?.(':scope > .document'), mark = box?.querySelector('mark');
  if (mark) box.scrollTop = mark.offsetTop - (box.clientHeight - mark.offsetHeight) / 2;
}, true)"""
# Of a document that waits in the box gradio shows only that there is one.
NAMED = """(said) => {
  setTimeout(() => document.querySelectorAll('#box .thumbnail-item').forEach((each, at) => {
    each.title = said?.files?.[at]?.orig_name ?? '';
    each.parentElement.ariaLabel = each.title;
  }));
  return [];
}"""
# Files in the box are read before they are sent, and forgotten if they are taken out of it.
KEPT_UP = """(said) => {
  const files = (said?.files ?? []).map((each) => each.path).join('\\n');
  if (files !== (window.kvliteFiles ?? '')) {
    window.kvliteFiles = files;
    setTimeout(() => document.getElementById('keep-up')?.click());
  }
  return [];
}"""
# What could not be read leaves the box, whatever was typed meanwhile.
REFUSED = """(gone, said) => {
  const paths = gone.split('\\n'), files = said?.files ?? [];
  return {...said, files: files.filter((each) => !paths.includes(each.path))};
}"""
# Of lists that come in another order than they were asked for, the newest stays: of this query, but
# for a clock that was set back.
LISTED = """(listed) => {
  const [at, query, html] = JSON.parse(listed), newest = window.kvliteListed?.at ?? 0;
  const old = newest - 60 < at && at < newest;
  const asked = document.querySelector('#search textarea, #search input')?.value ?? '';
  if (!newest || (!old && query === asked)) window.kvliteListed = {at, html};
  return window.kvliteListed.html;
}"""
# Gradio takes files that are dropped on its box alone; elsewhere a browser would leave the page to
# open them.
DROPPED = """() => {
  const carries = (event) => event.dataTransfer?.types.includes('Files');
  document.addEventListener('dragover', (event) => carries(event) && event.preventDefault());
  document.addEventListener('drop', (event) => {
    if (!carries(event) || event.target.closest?.('#box')) return;
    event.preventDefault();
    const input = document.querySelector('#box input[type=file]');
    input.files = event.dataTransfer.files;
    input.dispatchEvent(new Event('change', {bubbles: true}));
  });
}"""
# A conversation has an address of its own, which a tab goes back to, and gives the tab its title.
ADDRESSED = """(kept, ...others) => {
  window.onhashchange = () => location.reload();
  return [location.hash.slice(1) || kept, ...others];
}"""
# What is sent before the page knows which conversation it shows waits until it does; after half a
# minute it begins a new one.
ARRIVED = """async (id, ...others) => {
  const here = () => document.querySelector('#here textarea, #here input')?.value;
  for (let left = 600; left && !(id ||= here()); left--)
    await new Promise((go) => setTimeout(go, 50));
  return [id, ...others];
}"""
TITLED = """(id, name) => {
  document.title = name ? `${name} · kvlite` : 'kvlite';
  history.replaceState(null, '', id ? '#' + id : location.pathname);
  document.dispatchEvent(new Event('kvlite:shown'));  // which list.js hears
  return [];
}"""
# What is beside the conversation, in sight.
BESIDE = """() => {
  const side = document.getElementById('side');
  if (!side?.classList.contains('open')) side?.querySelector('.toggle-button')?.click();
  return [];
}"""
# What tunes the settings, in sight.
TUNED = """() => {
  requestAnimationFrame(() => document.getElementById('tuning')?.scrollIntoView());
  return [];
}"""
# Sent to the page with a name, it saves a text as a file without leaving the machine.
SAVE_AS_FILE = """(text, name) => {
  if (!text) return [text, name];
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], {type: 'text/plain;charset=utf-8'}));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
  return ['', ''];
}"""
