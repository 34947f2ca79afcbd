use super::*;

fn input(name: &str, bytes: u64) -> Input {
    Input { path: name.into(), bytes, mtime: (0, 0) }
}

#[test]
fn slices_hold_everything_once_and_are_bounded() {
    let inputs: Vec<_> = (1..200).map(|n| input("x", (n * 7919 * 131) % SLICE_BYTES + 1)).collect();
    let slices = slices(&inputs);
    assert_eq!(slices.concat(), inputs);
    for slice in &slices {
        assert!(slice.iter().map(|input| input.bytes).sum::<u64>() <= SLICE_BYTES);
    }
    assert!(slices.len() > 50);
    assert!(super::slices(&[]).is_empty());
}

#[test]
fn selection_is_sorted_within_budget_and_of_plain_files_only() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::create_dir(at("b")).unwrap();
    for (name, bytes) in [("c", 5000), ("a", 6000), ("b/x", 4096), ("b/small", 4095), ("b/new\nline", 5000)] {
        std::fs::write(at(name), vec![1; bytes]).unwrap();
    }
    std::os::unix::fs::symlink(at("a"), at("b/link")).unwrap();
    let names = |budget| {
        select(&[dir.path()], budget)
            .into_iter()
            .map(|input| input.path.strip_prefix(dir.path()).unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(1 << 20), ["a", "b/x", "c"].map(PathBuf::from));
    assert_eq!(names(6000 + 4999), ["a", "b/x"].map(PathBuf::from));
    assert_eq!(names(5999), ["b/x"].map(PathBuf::from));
}

#[test]
fn an_archive_that_cannot_be_built_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let (files, empty, none) = (dir.path().join("files"), dir.path().join("empty"), dir.path().join("none"));
    std::fs::create_dir(&files).unwrap();
    std::fs::create_dir(&empty).unwrap();
    std::fs::write(files.join("file"), [1; 5000]).unwrap();
    // It takes `md5sum` for a pattern: it reads everything, and prints nothing.
    let silent = find::find_program("awk", "mawk").unwrap();
    let error = |busybox: &Path, files: &Path, cache: &Path| {
        let error = archive(busybox.into(), &[files], cache, 1).unwrap_err();
        let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
        causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
    };
    let said = error(&silent, &empty, dir.path());
    assert!(said.starts_with("found no files to give to guests below "), "{said}");
    let said = error(&silent, &files, &files.join("file/cache"));
    assert!(said.starts_with("cannot create ") && said.contains("/file/cache: set PAGEONE_CACHE"), "{said}");
    // A directory in which nobody can make a file.
    let said = error(&silent, &files, Path::new("/proc/self"));
    assert!(said.contains("(disk full? set PAGEONE_CACHE)"), "{said}");
    let said = error(&silent, &files, dir.path());
    assert!(said.ends_with(" md5sum printed no checksum"), "{said}");
    let said = error(&none, &files, dir.path());
    assert!(said.contains("No such file"), "{said}");
    let error = checksum(&none, b"").unwrap_err();
    assert!(error.to_string().starts_with("cannot run "), "{error}");
    let error = with_recycler(&dir.path().join("archive"), &none).unwrap_err();
    assert!(error.to_string().starts_with("cannot read "), "{error}");
    assert!(std::fs::read_dir(dir.path()).unwrap().flatten().all(|entry| entry.path().is_dir()), "no part is left");
}
