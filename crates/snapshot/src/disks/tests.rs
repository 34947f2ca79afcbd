use super::*;
use crate::fake;

impl Running {
    /// A qcow2 image of a device.
    pub(crate) fn of_device(device: &str, image: &Path) -> Self {
        let (handle, node) = (("device".into(), device.into()), "n".into());
        let (image, word, mark) = (image.into(), image.display().to_string(), mark(&Value::Null));
        Self { handle, node, mark, image, word, raw: false, copying: Default::default() }
    }
}

impl Overlay {
    /// QEMU's name for the image.
    pub(crate) fn writes_by(&self) -> &str {
        &self.node
    }
}

#[test]
fn a_disk_that_no_clone_could_have_is_refused_with_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk.img").display().to_string();
    std::fs::write(&image, "x").unwrap();
    let own = std::process::id() as i32;
    let refused_as = |option: &str, format: &str, image: &str, word: &str| {
        let inserted = json!({ "node-name": "n", "ro": false, "drv": format, "image": { "filename": image } });
        let all = json!([{ "device": "", "inserted": null }, { "device": "d0", "inserted": inserted }]);
        let words = [option, word].map(String::from);
        find(&mut fake::qemu(move |_| all.clone()), own, &words, Path::new("/")).map(drop).unwrap_err()
    };
    let refused = |format: &str, image: &str, word: &str| refused_as("-drive", format, image, word);
    let error = refused("vmdk", &image, "file=x");
    assert!(matches!(error, DiskError::Format { .. }), "{error}");
    assert!(error.to_string().starts_with("disk d0 is vmdk, and only qcow2 and raw can be stored"), "{error}");
    let error = refused("qcow2", &image, &format!("file={image}"));
    assert!(matches!(error, DiskError::Replaced { .. }), "{error}");
    assert!(error.to_string().starts_with(&format!("disk d0: QEMU does not write to {image}, whose")), "{error}");
    // A file system without shared blocks.
    let proc = "/proc/self/comm";
    let _open = std::fs::File::options().write(true).open(proc).unwrap();
    let error = refused("raw", proc, &format!("file={proc}"));
    assert!(matches!(error, DiskError::Reflink { .. }), "{error}");
    assert!(error.to_string().contains("is raw, and this file system cannot copy it at once"), "{error}");
    let error = refused_as("-blockdev", "raw", &image, &format!("raw,node-name=n,file.filename={image}"));
    assert!(matches!(error, DiskError::RawNode { .. }), "{error}");
    assert!(error.to_string().ends_with("is raw and named by -blockdev; name it by -drive, or use qcow2"), "{error}");
    let error = refused("qcow2", "nbd://host/disk", "file=nbd://host/disk");
    assert!(matches!(error, DiskError::NoFile { .. }), "{error}");
    assert!(error.to_string().starts_with("disk d0 is nbd://host/disk, and only files of this host can"), "{error}");
    let error = refused("qcow2", &image, "if=none,id=d0");
    assert!(matches!(error, DiskError::NotNamed { .. }), "{error}");
    assert!(error.to_string().contains("is not named on the command line, by file="), "{error}");
    let error = refused("qcow2", &image, &format!("file={image},copy-on-read=on"));
    assert!(error.to_string().ends_with("when it is stored; start it without copy-on-read"), "{error}");
    let comma = dir.path().join("a,b.img").display().to_string();
    std::fs::copy(&image, &comma).unwrap();
    let written = comma.replace(',', ",,");
    let error = refused_as("-blockdev", "raw", &comma, &format!("raw,node-name=n,file.filename={written}"));
    assert!(matches!(error, DiskError::RawNode { .. }), "{error}");
    let below = |below, _| json!({ "filename": image, "backing-image": below });
    let image = (0..=MAX_IMAGES).fold(Value::Null, below);
    let all =
        json!([{ "device": "d0", "inserted": { "node-name": "n", "ro": false, "drv": "qcow2", "image": image } }]);
    let error = find(&mut fake::qemu(move |_| all.clone()), own, &[], Path::new("/")).map(drop).unwrap_err();
    assert!(error.to_string().starts_with("disk d0 has 501 images, and its QEMU opens all of them"), "{error}");
    // Each is fast enough, and all together are not.
    let raw = Running { copying: (Duration::from_millis(60), 7), ..Running::of_device("d0", Path::new("/d")) };
    let error = ensure_fast(&[raw.clone(), raw.clone()], Duration::from_millis(100)).unwrap_err();
    assert!(ensure_fast(&[raw], Duration::from_millis(100)).is_ok() && matches!(error, DiskError::Slow { .. }));
    let start = "copying the raw disks would take about 121 ms, in which the guest stands, for they lie in 14 pieces";
    assert!(error.to_string().starts_with(start) && error.to_string().contains("use --max-pause 242"), "{error}");
    // The image over it.
    let base = dir.path().join("base.qcow2");
    qcow2::create(&base, 1 << 20, None, 0o600).unwrap();
    let own = Account::of(std::process::id()).unwrap();
    let mut overlay = Running::of_device("d0", &base).overlay("one", &[]);
    // A file system without hard links.
    let link = || Running::of_device("d0", &base).make(&mut overlay, &own).unwrap_err();
    let error = kmem::testing::refusing(libc::SYS_linkat, None, libc::EPERM, link);
    assert!(matches!(error, DiskError::Link { .. }), "{error}");
    assert!(error.to_string().contains("put it on a file system with hard links"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3, "nothing was changed");
    std::fs::write(dir.path().join("base.one.qcow2"), "another's").unwrap();
    // What is there stays.
    let (named, own_name) = (|overlay: &Overlay| overlay.stored().file_name().unwrap().to_owned(), "base.one.qcow2");
    let next = Running::of_device("d0", &base).first_overlay("one", &[]);
    assert_eq!((named(&overlay), named(&next)), (own_name.into(), "base.one-1.qcow2".into()));
    let disk = Running { raw: true, ..Running::of_device("d0", Path::new("/nonexistent/disk")) };
    let nowhere = disk.make(&mut disk.overlay("one", &[]), &own).unwrap_err();
    assert!(matches!(nowhere, DiskError::Make { .. }), "{nowhere}");
    assert!(nowhere.to_string().starts_with("cannot make the image /"), "{nowhere}");
}

#[test]
fn two_disks_with_one_stem_get_two_names() {
    let dir = tempfile::tempdir().unwrap();
    let disks = ["vm.a", "vm.b", "vm.c"].map(|name| Running::of_device(name, &dir.path().join(name)));
    disks.iter().for_each(|disk| qcow2::create(&disk.image, 1 << 20, None, 0o600).unwrap());
    std::fs::write(dir.path().join("vm.one.qcow2"), "another's").unwrap();
    let mut all = overlays(&disks, |disk, others| disk.first_overlay("one", others));
    let own = Account::of(std::process::id()).unwrap();
    disks.iter().zip(&mut all).for_each(|(disk, overlay)| disk.make(overlay, &own).unwrap());
    let names = all.iter().map(|overlay| overlay.stored().file_name().unwrap().to_str().unwrap());
    assert_eq!(names.collect::<Vec<_>>(), [1, 2, 3].map(|again| format!("vm.one-{again}.qcow2")));
}

#[test]
fn a_disk_that_is_another_by_now_or_that_qemu_would_still_write_to_is_not_covered() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk.qcow2");
    qcow2::create(&image, 1 << 20, None, 0o600).unwrap();
    let written = std::fs::File::options().write(true).open(&image).unwrap();
    let words = ["-drive".into(), format!("file={}", image.display())];
    let says = |node: &str, size: u64| {
        let image = json!({ "filename": image, "virtual-size": size });
        let all = json!([{ "device": "d0", "inserted": { "node-name": node, "drv": "qcow2", "image": image } }]);
        fake::qemu(move |asked| if asked == "query-block" { all.clone() } else { json!({}) })
    };
    let disks = find(&mut says("n", 1 << 20), std::process::id() as i32, &words, Path::new("/")).unwrap();
    ensure_same(&disks, &mut says("n", 1 << 20)).unwrap();
    for mut qemu in [says("over-it", 1 << 20), says("n", 2 << 20), fake::qemu(|_| json!([]))] {
        assert!(matches!(ensure_same(&disks, &mut qemu), Err(DiskError::Changed)));
    }
    let mut overlay = disks[0].overlay("one", &[]);
    disks[0].make(&mut overlay, &Account::of(std::process::id()).unwrap()).unwrap();
    let error = disks[0].cover(&mut says("n", 1 << 20), &overlay).unwrap_err();
    assert!(matches!(error, DiskError::Written { .. }), "{error}");
    drop(written);
    disks[0].cover(&mut says("n", 1 << 20), &overlay).unwrap();
}

#[test]
fn a_failed_save_removes_the_copy_that_it_made_and_no_other_file_of_that_name() {
    let dir = tempfile::tempdir().unwrap();
    let (own, image) = (Account::of(std::process::id()).unwrap(), dir.path().join("web.img"));
    std::fs::write(&image, "raw").unwrap();
    let disk = Running { raw: true, ..Running::of_device("d0", &image) };
    let mut copy = disk.overlay("one", &[]);
    let undo = |copy: &Overlay| copy.undo(&mut fake::qemu(|_| json!([])), &|_| {}).unwrap();
    // Meanwhile another save took the name.
    std::fs::write(&copy.image, "another's").unwrap();
    disk.make(&mut copy, &own).unwrap_err();
    undo(&copy);
    copy.end();
    std::fs::remove_file(&copy.image).unwrap();
    disk.make(&mut copy, &own).unwrap();
    let open = std::fs::File::open(&copy.image).unwrap();
    undo(&copy);
    assert!(copy.image.exists(), "QEMU has it");
    drop(open);
    undo(&copy);
    assert!(!copy.image.exists());
}
