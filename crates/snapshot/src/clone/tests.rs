use super::*;
use crate::record::Disk;

#[test]
fn all_ends_of_networks_are_known() {
    let text = "e1000.0: index=0,type=nic,model=e1000\r\n \\ #net069: index=0,type=user,net=10.0.2.0\r\ncard: index=0,type=nic\r\n";
    assert_eq!(ends(text).collect::<Vec<_>>(), ["e1000.0", "#net069", "card"]);
    let hub = "hub 0\r\n \\ hub0port1: #net144: index=0,type=user\r\n \\ hub0port0: e1000.0: index=0,type=nic\r\n";
    assert_eq!(ends(hub).collect::<Vec<_>>(), ["#net144", "e1000.0"]);
}

#[test]
fn what_keeps_a_clone_from_starting_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let (ram, image) = (File::open("/dev/null").unwrap(), dir.path().join("disk.qcow2"));
    qcow2::create(&image, 1 << 20, None, 0o600).unwrap();
    let refused = |program: &str, image: &Path, name: &str, extra: &[&str]| {
        let disks = vec![Disk { word: "disk.qcow2".into(), image: image.into(), ..Disk::default() }];
        let facts = Facts { ram: 64 << 20, ..Facts::default() };
        let words = ["-m", "64"].map(String::from).to_vec();
        let (program, directory) = (program.into(), dir.path().into());
        let description = Description { program, directory, words, facts, disks, ..Description::default() };
        let record = Record { description, stream: Vec::new() };
        let extra: Vec<String> = extra.iter().copied().map(String::from).collect();
        let (ram, rights) = (Ram::Shared(&ram), Rights::own().unwrap());
        let options = Options { extra: &extra, ..Options::passing(&record, &rights, ram) };
        start(&options, &dir.path().join(name)).map(drop).unwrap_err()
    };
    let error = refused("sh", &image, "a", &["-m", "128"]);
    assert!(matches!(error, CloneError::Differs(_)), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("this guest would differ from the one that was stored: RAM: 128 MiB"), "{text}");
    let error = refused("sh", &image, "none/b", &[]);
    assert!(matches!(error, CloneError::Make { .. }), "{error}");
    assert!(error.to_string().ends_with("none/b for the clone"), "{error}");
    // What is there already is another's.
    std::fs::create_dir(dir.path().join("b")).unwrap();
    let error = refused("sh", &image, "b", &[]);
    assert!(error.to_string().ends_with("b for the clone") && dir.path().join("b").exists(), "{error}");
    let error = refused("sh", Path::new("/nonexistent/disk"), "c", &[]);
    assert!(!dir.path().join("c").exists());
    assert!(matches!(error, CloneError::Image { .. }), "{error}");
    assert!(error.to_string().starts_with("the image /nonexistent/disk can't be used"), "{error}");
    let changed = Layer { len: 1, ..Layer::of(&image).unwrap() };
    let error = check_layer(&changed).unwrap_err();
    assert!(matches!(error, CloneError::Changed(..)), "{error}");
    let says = format!("`touch -d @{} {}` says so", images::time(&changed), image.display());
    assert!(error.to_string().contains("is not what was stored") && error.to_string().ends_with(&says), "{error}");
    let error = refused("/nonexistent/qemu", &image, "d", &[]);
    assert!(matches!(error, CloneError::Run { .. }), "{error}");
    assert_eq!(error.to_string(), "cannot run /nonexistent/qemu");
    // A program that ends, with and without a word.
    let error = refused("false", &image, "e", &[]);
    assert!(matches!(error, CloneError::Qmp { .. }), "{error}");
    assert_eq!(error.to_string(), "the clone does not start");
    let text = refused("ls", &image, "f", &["--no-such-option"]).to_string();
    assert!(text.starts_with("the clone does not start. QEMU says: ") && text.contains("ls: "), "{text}");
}
