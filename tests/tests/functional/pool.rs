//! `pageone pool`, as its user sees it.

use std::path::Path;
use std::process::{Command, Output};

use e2e::program;
use kmem::testing::{KernelKey, in_own_session};
use serde_json::Value;

fn pool(dir: &Path, args: &[&str]) -> Output {
    Command::new(program("pageone")).arg("pool").arg("--pools").arg(dir.join("names")).args(args).output().unwrap()
}

fn ok(dir: &Path, args: &[&str]) -> String {
    let out = pool(dir, args);
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn refused(dir: &Path, args: &[&str]) -> String {
    fails(dir, args, 1)
}

/// Wrong usage.
fn misused(dir: &Path, args: &[&str]) -> String {
    fails(dir, args, 2)
}

fn fails(dir: &Path, args: &[&str], code: i32) -> String {
    let out = pool(dir, args);
    assert_eq!(out.status.code(), Some(code), "{args:?}");
    String::from_utf8(out.stderr).unwrap()
}

#[test]
fn a_pool_from_its_making_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (capacity, staging) = (at("capacity"), at("staging"));
    assert!(ok(dir.path(), &["create", "one", "--capacity", &capacity]).contains("capacity"));
    assert!(refused(dir.path(), &["create", "one", "--capacity", &at("other")]).contains("already"));
    assert!(refused(dir.path(), &["create", "two", "--capacity", &capacity]).contains("already"));
    ok(dir.path(), &["add", "one", "staging", &staging]);
    assert!(refused(dir.path(), &["add", "one", "staging", &at("more")]).contains("staging"));
    assert!(misused(dir.path(), &["add", "one", "memory", &at("lost")]).contains("only staging can be added"));
    assert!(!Path::new(&at("lost")).exists(), "nothing was made");
    ok(dir.path(), &["rename", "one", "first"]);
    let list: Value = serde_json::from_str(&ok(dir.path(), &["list", "--json"])).unwrap();
    assert_eq!((list[0]["name"].as_str(), list[0]["state"].as_str()), (Some("first"), Some("ready")));
    let shown: Value = serde_json::from_str(&ok(dir.path(), &["show", "first", "--json"])).unwrap();
    assert_eq!((shown["name"].as_str(), shown["classes"].as_array().unwrap().len()), (Some("first"), 2));
    assert!(ok(dir.path(), &["check", "first"]).contains("0 mblocks"));
    assert!(ok(dir.path(), &["ls", "first"]).contains("checkpoint"));
    assert!(ok(dir.path(), &["du", "first"]).contains("on the media"));
    assert!(refused(dir.path(), &["rm", "first", "nothing"]).contains("nothing"));
    assert!(refused(dir.path(), &["show", "one"]).contains("no pool is called"));
    assert!(misused(dir.path(), &["destroy", "first"]).contains("--yes"));
    assert!(misused(dir.path(), &["create", "a name", "--capacity", &at("other")]).contains("is no name for a pool"));
    ok(dir.path(), &["destroy", "first", "--yes"]);
    assert!(!Path::new(&capacity).exists() && !Path::new(&staging).exists());
    assert_eq!(ok(dir.path(), &["list"]), "");
}

#[test]
fn a_damaged_superblock_is_said_and_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let capacity = dir.path().join("capacity");
    ok(dir.path(), &["create", "one", "--capacity", &capacity.display().to_string()]);
    let mut bytes = std::fs::read(capacity.join("superblock")).unwrap();
    bytes[20] ^= 4;
    std::fs::write(capacity.join("superblock"), &bytes).unwrap();
    let out = pool(dir.path(), &["check", "one", "--read-only"]);
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(text.contains("the superblock of class capacity is damaged at byte 0"), "{text}");
    let out = pool(dir.path(), &["check", "one", "--read-only", "--json"]);
    let found: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((out.status.code(), found["findings"].as_array().unwrap().len()), (Some(1), 1), "{found}");
    assert_eq!((found["mblocks"].as_u64(), found["read_bytes"].as_u64()), (Some(0), Some(0)), "{found}");
    assert!(ok(dir.path(), &["check", "one"]).contains("repaired"));
    assert!(!ok(dir.path(), &["check", "one", "--read-only"]).contains("damaged"));
}

/// Makes a key as the guide says.
fn key(file: &Path) -> String {
    let file = file.display().to_string();
    let made = Command::new("sh").args(["-c", &format!("(umask 77; head -c 32 /dev/urandom > {file})")]).status();
    assert!(made.unwrap().success());
    file
}

#[test]
fn an_encrypted_pool_is_opened_by_its_key_wherever_that_is() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (first, second) = (key(&dir.path().join("first.key")), key(&dir.path().join("second.key")));
    let made = ok(dir.path(), &["create", "one", "--capacity", &at("capacity"), "--key-file", &first]);
    assert!(made.contains(&format!("encrypted, key {first}")), "{made}");
    ok(dir.path(), &["add", "one", "staging", &at("staging")]);
    ok(dir.path(), &["rename", "one", "tenant"]);
    let shown: Value = serde_json::from_str(&ok(dir.path(), &["show", "tenant", "--json"])).unwrap();
    assert_eq!((shown["key_file"].as_str(), shown["format"].as_u64()), (Some(&*first), Some(3)));
    // The key is gone: every command says so, and what to do.
    std::fs::rename(&first, at("moved.key")).unwrap();
    for command in [&["show", "tenant"][..], &["check", "tenant"], &["ls", "tenant"], &["repack", "tenant"]] {
        let err = refused(dir.path(), command);
        assert!(err.contains("its key") && err.contains("pageone pool key POOL --key-file FILE"), "{err}");
    }
    assert!(ok(dir.path(), &["list"]).contains("is encrypted"));
    let err = refused(dir.path(), &["key", "tenant", "--key-file", &second]);
    assert!(err.contains("cannot be read"), "{err}");
    ok(dir.path(), &["key", "tenant", "--key-file", &at("moved.key")]);
    ok(dir.path(), &["check", "tenant"]);
    // Another key: the one before opens it no more.
    ok(dir.path(), &["key", "tenant", "--key-file", &second]);
    ok(dir.path(), &["check", "tenant"]);
    std::fs::copy(at("moved.key"), &second).unwrap();
    let err = refused(dir.path(), &["check", "tenant"]);
    assert!(err.contains("is not the key of") && err.contains("nothing was read or written"), "{err}");
    assert!(refused(dir.path(), &["rebuild", "tenant", "--yes"]).contains("is not the key of"));
    ok(dir.path(), &["create", "plain", "--capacity", &at("plain")]);
    assert!(refused(dir.path(), &["key", "plain", "--key-file", &second]).contains("is not encrypted"));
    ok(dir.path(), &["destroy", "tenant", "--yes"]);
    assert!(!dir.path().join("capacity").exists());
}

#[test]
fn an_encrypted_pool_finds_its_key_in_the_kernels_keyrings() {
    let Some(first) = KernelKey::new("user", "pool-first", &[3; 32]) else { return };
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (name, file) = (first.name(), key(&dir.path().join("file.key")));
    let made = ok(dir.path(), &["create", "tenant", "--capacity", &at("capacity"), "--kernel-key", name]);
    assert!(made.contains(&format!("encrypted, key {name:?} in the kernel's keyrings")), "{made}");
    let shown = || -> Value { serde_json::from_str(&ok(dir.path(), &["show", "tenant", "--json"])).unwrap() };
    assert_eq!((shown()["kernel_key"].as_str(), &shown()["key_file"]), (Some(name), &Value::Null));
    // A service of systemd has a session of its own, without the user's keyring.
    let mut service = Command::new(program("pageone"));
    service.args(["pool", "check", &at("capacity")]);
    let out = in_own_session(&mut service).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    // To a file and back, to another key.
    ok(dir.path(), &["key", "tenant", "--key-file", &file]);
    assert_eq!((shown()["key_file"].as_str(), &shown()["kernel_key"]), (Some(&*file), &Value::Null));
    ok(dir.path(), &["check", "tenant"]);
    let second = KernelKey::new("user", "pool-second", &[4; 32]).unwrap();
    ok(dir.path(), &["key", "tenant", "--kernel-key", second.name()]);
    std::fs::remove_file(&file).unwrap();
    ok(dir.path(), &["check", "tenant"]);
    // It is gone: every command says so, and what to do.
    second.unlink();
    for command in [&["show", "tenant"][..], &["check", "tenant"], &["key", "tenant", "--kernel-key", name]] {
        let err = refused(dir.path(), command);
        assert!(err.contains("is encrypted, and its key") && err.contains(second.name()), "{err}");
        assert!(
            err.contains("`keyctl padd user NAME @u < FILE` adds it") && err.contains("--kernel-key NAME"),
            "{err}"
        );
    }
    let err = refused(dir.path(), &["create", "other", "--capacity", &at("other"), "--kernel-key", second.name()]);
    assert!(err.contains("cannot be read: neither the session's keyring nor the user's"), "{err}");
    ok(dir.path(), &["destroy", "tenant", "--yes"]);
    for wrong in [&["key", "tenant"][..], &["key", "tenant", "--key-file", &file, "--kernel-key", name]] {
        assert_eq!(pool(dir.path(), wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn a_copy_of_a_pool_is_refused_until_it_is_adopted() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    ok(dir.path(), &["create", "one", "--capacity", &at("capacity"), "--staging", &at("staging")]);
    let copied = Command::new("cp").args(["-a", &at("capacity"), &at("copy")]).status().unwrap();
    assert!(copied.success());
    let err = refused(dir.path(), &["check", &at("copy")]);
    assert!(err.contains("is a copy") && err.contains("staging") && err.contains("pool adopt"), "{err}");
    ok(dir.path(), &["check", &at("copy"), "--salvage"]);
    ok(dir.path(), &["check", "one"]);
    ok(dir.path(), &["adopt", &at("copy")]);
    ok(dir.path(), &["check", &at("copy")]);
    assert!(refused(dir.path(), &["check", "one"]).contains("pool adopt"));
}

#[test]
fn a_pool_in_use_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let capacity = dir.path().join("capacity");
    ok(dir.path(), &["create", "one", "--capacity", &capacity.display().to_string()]);
    let file = std::fs::File::open(&capacity).unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    assert!(refused(dir.path(), &["show", "one"]).contains("in use"));
    assert!(ok(dir.path(), &["list"]).contains("in use"));
    assert!(refused(dir.path(), &["destroy", "one", "--yes"]).contains("in use"));
}
