import os
from pathlib import Path

import pytest

from sglang_pdd.keys import Keys, KeysError, make


def test_each_folder_is_complete(tmp_path: Path) -> None:
    assert make(tmp_path, ["p", "rld", "md"]) == ["p", "rld", "md"]
    loaded = {name: Keys.load(tmp_path / name) for name in ("p", "rld", "md")}
    publics = frozenset(keys.public for keys in loaded.values())
    assert len(publics) == 3
    for name, keys in loaded.items():
        assert keys.peers == publics
        assert len(keys.secret) == 40 and keys.secret not in repr(keys)
        assert os.stat(tmp_path / name / "secret.key").st_mode & 0o777 == 0o600
        files = {str(f.relative_to(tmp_path / name)) for f in (tmp_path / name).rglob("*") if f.is_file()}
        own = {"secret.key", "tls.key", "tls.crt"}
        assert files == own | {f"peers/{other}.{kind}" for other in ("p", "rld", "md") for kind in ("key", "crt")}
        assert os.stat(tmp_path / name / "tls.key").st_mode & 0o777 == 0o600
        for file in (tmp_path / name / "peers").iterdir():
            assert not any(other.secret in file.read_text() for other in loaded.values())


def test_existing_secrets_are_kept_and_learn_new_names(tmp_path: Path) -> None:
    make(tmp_path, ["p", "md"])
    before = (tmp_path / "p/secret.key").read_bytes()
    assert make(tmp_path, ["p", "md", "md2"]) == ["md2"]
    assert (tmp_path / "p/secret.key").read_bytes() == before
    assert Keys.load(tmp_path / "md2").public in Keys.load(tmp_path / "p").peers
    assert make(tmp_path, ["p", "md", "md2"], force=True) == ["p", "md", "md2"]
    assert (tmp_path / "p/secret.key").read_bytes() != before
    assert len(Keys.load(tmp_path / "p").peers) == 3


def test_certificates_are_kept_renewed_and_added(tmp_path: Path) -> None:
    make(tmp_path, ["p", "md"])
    before = (tmp_path / "p/tls.crt").read_text()
    (tmp_path / "md/tls.crt").unlink()  # as in a folder of an older version
    assert make(tmp_path, ["p"]) == []
    assert (tmp_path / "p/tls.crt").read_text() == (tmp_path / "md/peers/p.crt").read_text() == before
    assert (tmp_path / "md/tls.crt").read_text() == (tmp_path / "p/peers/md.crt").read_text()
    make(tmp_path, ["p"], force=True)
    assert (tmp_path / "p/tls.crt").read_text() == (tmp_path / "md/peers/p.crt").read_text() != before


def test_an_existing_secret_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    make(tmp_path, ["p"])
    (tmp_path / "p/secret.key").write_text("precious\n")
    with pytest.raises(KeysError, match=r"secret\.key"):
        make(tmp_path, ["p"])
    assert (tmp_path / "p/secret.key").read_text() == "precious\n"


@pytest.mark.parametrize("names", [[], [""], ["a/b"], [".."], ["-x"], ["a", "a"], ["a b"]])
def test_bad_names(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(KeysError):
        make(tmp_path, names)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o602])
def test_a_secret_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    make(tmp_path, ["p"])
    os.chmod(tmp_path / "p/secret.key", mode)
    with pytest.raises(KeysError, match="chmod 600"):
        Keys.load(tmp_path / "p")


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_modes_of_mounted_secrets(tmp_path: Path, mode: int) -> None:
    make(tmp_path, ["p"])
    os.chmod(tmp_path / "p/secret.key", mode)
    assert Keys.load(tmp_path / "p").peers


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    make(tmp_path, ["p", "md"])
    folder = tmp_path / "p"
    peer = folder / "peers/md.key"
    good = {file: file.read_text() for file in (folder / "secret.key", peer)}

    def refused(match: str) -> None:
        with pytest.raises(KeysError, match=match) as caught:
            Keys.load(folder)
        assert "\n" not in str(caught.value)
        for file, text in good.items():
            file.write_text(text)

    peer.write_text('curve\n    public-key = "short"\n')
    refused(r"md\.key")
    peer.write_text("nothing\n")
    refused(r"md\.key")
    (folder / "secret.key").write_text(good[peer])  # a public certificate in its place
    refused("no secret key")
    mine, others = Keys.load(folder), Keys.load(tmp_path / "md")
    (folder / "secret.key").write_text(good[folder / "secret.key"].replace(mine.public, others.public))
    refused("does not belong")
    for file in (folder / "peers").iterdir():
        file.unlink()
    with pytest.raises(KeysError, match="put the public keys"):
        Keys.load(folder)
    with pytest.raises(KeysError, match="is missing"):
        Keys.load(tmp_path / "nowhere")


def test_a_node_that_is_added_alone_is_known_to_all(tmp_path: Path) -> None:
    make(tmp_path, ("a", "b"))
    assert make(tmp_path, ("c",)) == ["c"]
    new = Keys.load(tmp_path / "c").public
    assert all(new in Keys.load(tmp_path / name).peers for name in ("a", "b", "c"))
    assert len(Keys.load(tmp_path / "c").peers) == 3
    make(tmp_path, ("c",), force=True)
    assert Keys.load(tmp_path / "c").public != new
    assert all(Keys.load(tmp_path / "c").public in Keys.load(tmp_path / name).peers for name in ("a", "b"))


def test_the_folder_of_all_nodes_is_not_a_nodes_folder(tmp_path: Path) -> None:
    make(tmp_path, ("a", "b"))
    with pytest.raises(KeysError, match=r"did you mean .*/a\?"):
        Keys.load(tmp_path)
