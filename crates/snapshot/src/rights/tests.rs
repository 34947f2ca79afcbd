use std::os::unix::fs::{PermissionsExt, chown};

use super::*;
use crate::record::{Disk, Layer, Source};

const NOBODY: u32 = 65534;

fn allow(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

/// A pool's directory with a file, a program beside it, and what a snapshot says of a guest of
/// nobody's.
fn stored() -> (tempfile::TempDir, PathBuf, Description) {
    let dir = tempfile::tempdir().unwrap();
    let (pool, program) = (dir.path().join("pool"), dir.path().join("qemu-system-x86_64"));
    std::fs::create_dir(&pool).unwrap();
    for file in [&program, &pool.join("data")] {
        std::fs::write(file, "").unwrap();
        allow(file, 0o644);
    }
    let source = Some(Source { uid: NOBODY, gid: NOBODY, groups: vec![7], ..Source::of(std::process::id()).unwrap() });
    (dir, pool, Description { program, source, ..Description::default() })
}

fn asked(user: Option<u32>, trust: bool) -> Asked {
    let account = |uid| Account { uid, gid: uid, groups: Vec::new(), capabilities: 0 };
    Asked { user: user.map(account), trust }
}

#[test]
fn a_guest_of_a_container_or_with_words_of_anothers_is_not_tried_unasked() {
    if !is_root() {
        return;
    }
    let (_dir, pool, stored) = stored();
    let trial = |description: &Description, trust| Rights::of_trial(description, &asked(None, trust));
    let of = |uid, elsewhere, words: &[&str]| {
        let source = Some(Source { uid, elsewhere, ..stored.source.clone().unwrap() });
        Description { source, words: words.iter().map(|&word| word.into()).collect(), ..stored.clone() }
    };
    let reaching = ["-L", "/usr/share"];
    let (inside, others) = (of(0, true, &[]), of(NOBODY, false, &reaching));
    assert!(matches!(trial(&inside, false), Err(Untried::Elsewhere)));
    let said = trial(&others, false).unwrap_err().to_string();
    assert_eq!(
        said,
        "the guest is another account's, and -L /usr/share may reach files, programs or networks of this host"
    );
    for tried in [trial(&others, true), trial(&of(NOBODY, false, &[]), false)] {
        let rights = tried.unwrap();
        assert!(rights.account.uid == NOBODY && rights.place.is_some());
    }
    assert_eq!(trial(&inside, true).unwrap().account.uid, 0);
    assert!(trial(&of(0, false, &reaching), false).is_ok(), "the caller's own");
    // Nor is it run as who it was there.
    let error = Rights::of(&inside, &[pool], asked(None, false)).unwrap_err().to_string();
    assert!(
        error.starts_with("this snapshot is of a guest in a container, with mounts, users, processes or"),
        "{error}"
    );
}

fn is_root() -> bool {
    let is = rustix::process::geteuid().is_root();
    if !is {
        println!("SKIPPED: only root runs guests as others");
    }
    is
}

#[test]
fn clones_run_as_their_source_and_whose_is_not_known_as_nobody_is_asked() {
    if !is_root() {
        return;
    }
    let (_dir, pool, stored) = stored();
    let of = |description: &Description, asked: Asked| {
        Rights::of(description, std::slice::from_ref(&pool), asked)
            .map(|rights| (rights.account.uid, rights.is_confined))
    };
    assert_eq!(of(&stored, asked(None, false)).unwrap(), (NOBODY, false));
    assert_eq!(Rights::of(&stored, std::slice::from_ref(&pool), asked(None, false)).unwrap().account.groups, [7]);
    assert_eq!(of(&stored, asked(Some(5), false)).unwrap(), (5, false));
    let imported = Description { imported: true, ..stored.clone() };
    let old = Description { source: None, ..stored.clone() };
    for doubtful in [&imported, &old] {
        let error = of(doubtful, asked(None, false)).unwrap_err().to_string();
        assert!(error.contains("say as whom its guests are to run with --user"), "{error}");
        assert_eq!(of(doubtful, asked(None, true)).unwrap(), (0, false));
    }
    assert_eq!(of(&imported, asked(Some(5), false)).unwrap(), (5, true));
    assert_eq!(of(&old, asked(Some(5), false)).unwrap(), (5, false));
    let helper = Description { words: vec!["-netdev".into(), "bridge,id=n,helper=id".into()], ..imported.clone() };
    let error = of(&helper, asked(Some(5), false)).unwrap_err().to_string();
    assert!(error.starts_with("this snapshot was imported, and -netdev bridge,id=n,helper=id may reach"), "{error}");
    assert!(of(&helper, asked(Some(5), true)).is_ok());
    let shell = Description { program: "/bin/sh".into(), ..imported };
    let error = of(&shell, asked(Some(5), false)).unwrap_err().to_string();
    assert!(error.starts_with("/bin/sh is no QEMU, and this snapshot was imported"), "{error}");
    // Its own may be another.
    assert!(of(&Description { imported: false, ..shell }, asked(None, false)).is_ok());
}

#[test]
fn images_are_copied_as_their_guest_and_of_others_unread() {
    if !is_root() {
        return;
    }
    let (_dir, pool, stored) = stored();
    let of = |description: &Description, trust| {
        let read = reader(description, std::slice::from_ref(&pool), &asked(None, trust));
        read.map(|account| account.uid).map_err(|error| error.to_string())
    };
    assert_eq!((of(&stored, false), of(&stored, true)), (Ok(NOBODY), Ok(0)));
    let disk = |layers: Vec<Layer>| Disk { layers, ..Disk::default() };
    let noted = vec![disk(vec![Layer::of(&stored.program).unwrap()])];
    let imported = |disks| Description { imported: true, disks, ..stored.clone() };
    assert_eq!(of(&imported(noted), false), Ok(0), "import has noted what it wrote");
    let elsewhere = Source { elsewhere: true, ..stored.source.clone().unwrap() };
    for (doubtful, why) in [
        (imported(vec![disk(Vec::new())]), "was imported"),
        (Description { source: Some(elsewhere), ..stored.clone() }, "is of a guest in a container"),
        (Description { source: None, ..stored.clone() }, "was stored by an earlier version"),
    ] {
        let error = of(&doubtful, false).unwrap_err();
        assert!(error.starts_with(&format!("this snapshot {why}")) && error.contains("--trust copies all"), "{error}");
        assert_eq!(of(&doubtful, true), Ok(0));
    }
    allow(&pool, 0o777);
    let error = of(&stored, false).unwrap_err();
    assert!(error.starts_with("this snapshot lies in a pool that others can change"), "{error}");
}

#[test]
fn what_others_can_change_is_no_word_of_the_callers() {
    if !is_root() {
        return;
    }
    let (dir, pool, stored) = stored();
    let doubt = || match Rights::of(&stored, std::slice::from_ref(&pool), asked(None, false)) {
        Ok(_) => None,
        Err(error) => Some(error.to_string()),
    };
    assert_eq!(doubt(), None);
    for path in [pool.clone(), pool.join("data")] {
        for (owner, mode) in [(NOBODY, 0o755), (0, 0o777), (0, 0o775), (0, 0o1777)] {
            chown(&path, Some(owner), None).unwrap();
            allow(&path, mode);
            let text = doubt().unwrap_or_default();
            let want = format!("lies in a pool that others can change ({})", path.display());
            assert!(text.contains(&want), "{owner} {mode:o}: {text}");
        }
        chown(&path, Some(0), None).unwrap();
        allow(&path, 0o755);
    }
    assert_eq!(doubt(), None);
    // The program, and where it lies.
    for path in [&stored.program, dir.path()] {
        chown(path, Some(NOBODY), None).unwrap();
        let text = doubt().unwrap_or_default();
        assert!(text.contains("others"), "{text}");
        chown(path, Some(0), None).unwrap();
    }
    allow(&stored.program, 0o777);
    assert!(doubt().is_some_and(|text| text.contains("is not run: others than you and root can change")));
}

#[test]
fn what_others_wrote_is_not_copied_in_a_directory_of_its_choice() {
    let confined = Rights { is_confined: true, ..Rights::own().unwrap() };
    let started = crate::clone::Template::start(Path::new("/x"), Path::new("/bin/true"), Path::new("/"), &confined);
    assert!(started.map(drop).unwrap_err().to_string().ends_with("runs in a directory of its own"));
}

#[test]
fn another_account_does_not_inherit_the_callers_secrets() {
    let own = Rights::own().unwrap();
    let names = |rights: &Rights| rights.environment().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(&own).len(), std::env::vars_os().count());
    let other = Rights { account: Account { uid: own.account.uid + 1, ..own.account.clone() }, ..own };
    let is_kept = |name: &OsString| {
        let name = name.to_string_lossy();
        VARIABLES.contains(&&*name) || FAMILIES.iter().any(|first| name.starts_with(first))
    };
    let names = names(&other);
    assert!(names.iter().all(is_kept) && names.contains(&"PATH".into()), "{names:?}");
}
