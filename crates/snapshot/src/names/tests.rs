use super::*;

/// A disk `live` with the bytes `base`, and a new image with the bytes `new` over it.
fn made() -> (tempfile::TempDir, Names) {
    let dir = tempfile::tempdir().unwrap();
    let live = dir.path().join("live");
    fs::write(&live, "base").unwrap();
    let names = Names::new(&live, dir.path().join("stored"), "1");
    names.make().unwrap();
    fs::write(&names.fresh, "new").unwrap();
    (dir, names)
}

fn shows(names: &Names) -> [String; 3] {
    [&names.live, &names.stored, &names.fresh].map(|name| fs::read_to_string(name).unwrap())
}

#[test]
fn the_live_name_is_the_live_images_and_each_step_can_be_taken_again() {
    let (dir, names) = made();
    let (settled, unsettled) = (["new", "base", "new"], ["base", "base", "new"]);
    assert_eq!(shows(&names), unsettled);
    for _ in 0..2 {
        names.settle().unwrap();
        assert_eq!(shows(&names), settled);
    }
    for _ in 0..2 {
        names.unsettle().unwrap();
        assert_eq!(shows(&names), unsettled);
    }
    names.settle().unwrap();
    // Only the base becomes what it was, whatever has its name.
    make_read_only(&names.stored).unwrap();
    let writable = || fs::metadata(&names.stored).unwrap().mode() & WRITE != 0;
    assert!(!writable());
    names.let_write().unwrap();
    assert!(writable());
    let aside = dir.path().join("aside");
    fs::rename(&names.stored, &aside).unwrap();
    symlink("aside", &names.stored).unwrap();
    assert!(names.let_write().is_err() && make_read_only(&names.stored).is_err(), "a link is not followed");
    fs::copy(&aside, dir.path().join("other")).unwrap();
    fs::rename(dir.path().join("other"), &names.stored).unwrap();
    assert!(names.let_write().unwrap_err().to_string().ends_with("is another file by now"));
    fs::rename(&aside, &names.stored).unwrap();
    // An earlier snapshot's link is of no use any more, and other files are others'.
    for (name, goes) in [(".live.pageone-0", true), (".live.other", false), (".alive.pageone-0", false)] {
        symlink("live", dir.path().join(name)).unwrap();
        names.sweep(std::process::id() as i32);
        assert_eq!(is_link(&dir.path().join(name)), !goes, "{name}");
    }
    // So is an image to which nothing was written; one that has something stays.
    let left = dir.path().join(".live.pageone-2");
    for (bytes, goes) in [(None, true), (Some("written"), false)] {
        qcow2::create(&left, 1 << 30, None, 0o600).unwrap();
        bytes.iter().for_each(|bytes| fs::write(&left, bytes).unwrap());
        names.sweep(std::process::id() as i32);
        assert_eq!(left.exists(), !goes);
    }
    let written = |image: &Path, at: u64| {
        qcow2::create(image, 1 << 30, None, 0o600).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&File::options().write(true).open(image).unwrap(), &[1], at).unwrap();
        qcow2::is_empty(image).unwrap()
    };
    assert!(
        !written(&dir.path().join("in its table"), (3 << 16) + 8) && written(&dir.path().join("behind it"), 5 << 16)
    );
    assert_eq!(shows(&names), settled);
    names.unsettle().unwrap();
    names.remove();
    assert_eq!(fs::read_to_string(&names.live).unwrap(), "base");
    assert!(!names.stored.exists() && !is_link(&names.link()) && !names.fresh.exists());
}

/// Whoever renames may be killed behind each call: the next one finds its way.
#[test]
fn a_step_that_was_cut_short_is_finished_by_the_next_one() {
    let (_dir, names) = made();
    // `settle`, behind the first rename.
    fs::rename(&names.fresh, &names.live).unwrap();
    names.settle().unwrap();
    assert_eq!(shows(&names), ["new", "base", "new"]);
    // `unsettle`, behind each call.
    for cut in 1..4 {
        let spare = names.beside(".spare");
        fs::hard_link(&names.live, &spare).unwrap();
        if cut > 1 {
            names.make_link().unwrap();
            fs::rename(&spare, &names.fresh).unwrap();
        }
        if cut > 2 {
            fs::hard_link(&names.stored, &spare).unwrap();
        }
        names.settle().unwrap();
        assert_eq!(shows(&names), ["new", "base", "new"], "{cut}");
        names.unsettle().unwrap();
        assert_eq!(shows(&names), ["base", "base", "new"], "{cut}");
        names.settle().unwrap();
    }
    // A base that is below the live image stays.
    names.remove();
    assert_eq!(fs::read_to_string(&names.stored).unwrap(), "base");
}

/// Who saved, guarded and wrote is killed at once, as by a power failure, and no note is left.
#[test]
fn the_name_that_a_base_got_in_vain_goes_and_no_other_one() {
    let (dir, this) = (tempfile::tempdir().unwrap(), std::process::id() as i32);
    let path = |name: &str| dir.path().join(name);
    let live = path("disk.qcow2");
    qcow2::create(&live, 1 << 20, None, 0o600).unwrap();
    let make = |name: &str| {
        let names = Names::new(&live, path(name), name);
        names.make().unwrap();
        qcow2::create_over(&names.fresh, &names.stored, false).unwrap();
        names
    };
    let all = || {
        let all = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut all: Vec<String> = all.filter(|name| !name.starts_with('.')).collect();
        all.sort();
        all
    };
    make("cut-off");
    let written = make("written");
    let image = File::options().write(true).open(&written.fresh).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&image, &[1], 3 << 16).unwrap();
    fs::hard_link(&live, path("a-users")).unwrap();
    // Whoever makes such a file can have no other one removed.
    fs::write(path("others"), "others").unwrap();
    qcow2::create(&path(".disk.qcow2.pageone-x"), 1 << 20, Some((&path("others"), true)), 0o600).unwrap();
    let next = make("next");
    next.settle().unwrap();
    next.sweep(this);
    assert_eq!(all(), ["a-users", "disk.qcow2", "next", "others", "written"]);
    assert!(written.fresh.exists() && !path(".disk.qcow2.pageone-x").exists());
}
