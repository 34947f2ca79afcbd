use super::*;

fn kernels(versions: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for version in versions {
        std::fs::create_dir(dir.path().join(version)).unwrap();
        std::fs::write(dir.path().join(version).join("vmlinuz"), "x").unwrap();
    }
    dir
}

#[test]
fn the_newest_version_wins_by_number() {
    let dir = kernels(&["6.1.0-9-cloud-amd64", "6.1.0-56-cloud-amd64", "6.12.1-cloud-amd64"]);
    std::fs::create_dir(dir.path().join("6.1.0-99-cloud-amd64")).unwrap(); // holds no vmlinuz
    let found = newest(dir.path(), "", "/vmlinuz", |v| v.starts_with("6.1."));
    assert_eq!(found, Some(dir.path().join("6.1.0-56-cloud-amd64/vmlinuz")));
    let found = newest(dir.path(), "", "/vmlinuz", |_| true);
    assert_eq!(found, Some(dir.path().join("6.12.1-cloud-amd64/vmlinuz")));
    assert_eq!(newest(dir.path(), "", "/vmlinuz", |v| v.starts_with("5.")), None);
}

#[test]
fn an_explicit_kernel_that_is_not_there_is_an_error_with_its_name() {
    let error = find_kernel(Some(Path::new("/nonexistent/vmlinuz"))).unwrap_err();
    assert_eq!(error.to_string(), "cannot read the guest kernel /nonexistent/vmlinuz (--kernel)");
}

#[test]
fn the_cache_is_where_a_variable_says() {
    let by = |name: &'static str| cache_by(move |asked| (asked == name).then(|| "/a".into())).unwrap();
    assert_eq!(by("PAGEONE_CACHE"), Path::new("/a"));
    assert_eq!(by("XDG_CACHE_HOME"), Path::new("/a/pageone"));
    assert_eq!(by("HOME"), Path::new("/a/.cache/pageone"));
    let error = cache_by(|_| Some(OsString::new())).unwrap_err().to_string();
    assert!(error.starts_with("no place for the cache: none of PAGEONE_CACHE"), "{error}");
}

#[test]
fn what_is_not_installed_names_the_script_that_fetches_it() {
    let dir = kernels(&[]);
    let error = installed_kernel(dir.path().join("kernels"), dir.path()).unwrap_err().to_string();
    assert!(error.contains("no guest kernel in") && error.contains("run scripts/deps.sh demo"), "{error}");
    std::fs::write(dir.path().join("vmlinuz-6.1.0-9-cloud-amd64"), "x").unwrap();
    let kernel = installed_kernel(dir.path().join("kernels"), dir.path()).unwrap();
    let error = find_recycler(&kernel).unwrap_err().to_string();
    assert!(error.contains("modules/ppr.ko: run 'scripts/deps.sh ppr' and then"), "{error}");
}

#[test]
fn a_missing_program_names_its_package() {
    let error = find_program("no-such-program-here", "some-package").unwrap_err();
    assert!(error.to_string().contains("is not on PATH: install Debian's package some-package"), "{error}");
    assert!(find_program("sh", "dash").is_ok());
}

#[test]
fn a_dynamic_program_is_told_from_a_static_one() {
    // This test itself: Rust links against the C library dynamically, unless told otherwise.
    let own = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    assert_eq!(needs_interpreter(&own), cfg!(not(target_feature = "crt-static")));
    if cfg!(not(target_feature = "crt-static")) {
        let error = ensure_static(std::env::current_exe().unwrap()).unwrap_err().to_string();
        assert!(error.contains("is dynamically linked and cannot run in a guest"), "{error}");
    }
    assert!(!needs_interpreter(&own[..0x30]), "cut off inside the header");
    assert!(!needs_interpreter(b"#!/bin/sh\n"));
}
