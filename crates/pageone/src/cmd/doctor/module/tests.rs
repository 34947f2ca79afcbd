use std::fs;
use std::io;

use kmem::pageonefs::{File, OpenError};

use super::super::process::{CAP_SYS_ADMIN, Identity};
use super::super::report::Verdict;
use super::mounts::{Facts, Files, managed, of};
use super::*;

const RELEASE: &str = "6.12.95+deb12-amd64";
const EFIVARS: &str = "sys/firmware/efi/efivars";
const SECURE_BOOT: &str = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// A made root directory of a host.
struct Made(tempfile::TempDir);

impl Made {
    fn new(release: &str) -> Self {
        let made = Self(tempfile::tempdir().unwrap());
        made.write("proc/sys/kernel/osrelease", format!("{release}\n"));
        made
    }

    fn write(&self, path: &str, bytes: impl AsRef<[u8]>) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// As the package leaves it.
    fn with_source(self, version: u32) -> Self {
        self.write("usr/src/pageonefs-0.1.0/dkms.conf", "");
        self.write("usr/src/pageonefs-0.1.0/uapi.h", format!("#define PAGEONEFS_VERSION\t{version}\n"));
        self
    }

    /// As dkms and depmod leave it.
    fn with_file(self, release: &str, name: &str, bytes: &[u8]) -> Self {
        self.write(
            &format!("lib/modules/{release}/modules.dep"),
            format!("kernel/fs/xfs/xfs.ko: kernel/lib/libcrc32c.ko\nupdates/dkms/{name}:\n"),
        );
        self.write(&format!("lib/modules/{release}/updates/dkms/{name}"), bytes);
        self
    }

    fn look(&self) -> Module<'_> {
        Module::look(self.0.path())
    }

    fn kernel(&self) -> Check {
        self.look().kernel()
    }

    fn signature(&self) -> Check {
        self.look().signature().unwrap()
    }
}

fn signed() -> Vec<u8> {
    [&b"\x7fELF key"[..], b"~Module signature appended~\n"].concat()
}

#[test]
fn a_host_without_the_module_lacks_nothing() {
    for (release, words) in [(RELEASE, "pageonefs is not installed"), ("6.18.1", "not for Linux 6.18.1")] {
        let made = Made::new(release);
        let checks = checks(made.0.path(), &[]);
        assert_eq!((checks.len(), checks[0].verdict), (1, Verdict::Note), "{checks:?}");
        assert!(checks[0].found.contains(words), "{checks:?}");
        assert!(checks[0].remedy.as_ref().unwrap().starts_with("the agent does without"), "{checks:?}");
    }
}

#[test]
fn what_keeps_the_module_from_this_kernel_is_told() {
    let of = |release: &str| Made::new(release).with_source(kmem::pageonefs::VERSION);
    let made = of("6.18.1").with_file(RELEASE, "pageonefs.ko", b"");
    let check = made.kernel();
    assert!(check.remedy.as_ref().unwrap().contains(&format!("it is there for {RELEASE}")), "{check:?}");
    let made = of(RELEASE);
    let check = made.kernel();
    assert!(check.found.ends_with("its headers are missing"), "{check:?}");
    assert_eq!(check.fix.unwrap().command, format!("apt-get install linux-headers-{RELEASE}"));
    made.write(&format!("lib/modules/{RELEASE}/build/Makefile"), "");
    let check = made.kernel();
    assert!(check.found.ends_with("the headers are here"), "{check:?}");
    assert!(check.remedy.unwrap().contains("/var/lib/dkms/pageonefs/0.1.0/build/make.log"));
    let check = made.with_file(RELEASE, "pageonefs.ko.xz", b"").kernel();
    assert!(check.verdict == Verdict::Note && check.found.ends_with("and not loaded"), "{check:?}");
}

#[test]
fn a_loaded_module_has_its_taint_and_is_there_after_the_next_boot_or_not() {
    let made = Made::new(RELEASE);
    made.write("sys/module/pageonefs/taint", "OE\n");
    let check = made.kernel();
    assert!(check.verdict == Verdict::Note && check.remedy.unwrap().contains("after the next boot"));
    let made = made.with_file(RELEASE, "pageonefs.ko", b"");
    let check = made.kernel();
    assert_eq!((check.verdict, check.found.as_str()), (Verdict::Ok, "pageonefs is loaded, and taints the kernel (OE)"));
    assert!(made.look().signature().is_none(), "the kernel took it");
}

#[test]
fn a_package_of_another_version_is_told() {
    let own = kmem::pageonefs::VERSION;
    assert_eq!(Made::new(RELEASE).with_source(own).look().interface().unwrap().verdict, Verdict::Ok);
    let check = Made::new(RELEASE).with_source(own + 1).look().interface().unwrap();
    assert!(check.found.contains(&format!("version {}, this program {own}", own + 1)), "{check:?}");
}

#[test]
fn a_kernel_that_takes_all_modules_wants_no_signature() {
    let made = Made::new(RELEASE).with_file(RELEASE, "pageonefs.ko", b"");
    assert_eq!(made.signature().verdict, Verdict::Ok, "no EFI");
    made.write(&format!("{EFIVARS}/{SECURE_BOOT}"), [6, 0, 0, 0, 0]);
    assert_eq!(made.signature().verdict, Verdict::Ok, "off");
    made.write("sys/kernel/security/lockdown", "[none] integrity confidentiality\n");
    made.write(&format!("{EFIVARS}/{SECURE_BOOT}"), [6, 0, 0, 0, 1]);
    assert_eq!(made.signature().verdict, Verdict::Ok, "on, and the kernel does not mind");
}

#[test]
fn with_secure_boot_the_signature_must_count() {
    let made = Made::new(RELEASE).with_source(kmem::pageonefs::VERSION);
    made.write(&format!("{EFIVARS}/{SECURE_BOOT}"), [6, 0, 0, 0, 1]);
    assert!(made.signature().found.ends_with("signed modules only (Secure Boot)"));
    made.write("sys/kernel/security/lockdown", "none [integrity] confidentiality\n");
    assert!(made.signature().found.contains("(lockdown"));
    let made = made.with_file(RELEASE, "pageonefs.ko", b"\x7fELF, and longer than the mark of a signature");
    assert!(made.signature().found.ends_with("and pageonefs is not signed"));
    let made = made.with_file(RELEASE, "pageonefs.ko", &signed());
    assert!(made.signature().found.ends_with("can't be seen"), "no certificate");
    made.write(CERTIFICATE, b"certificate");
    assert!(made.signature().found.ends_with("can't be seen"), "no list");
    made.write(&format!("{EFIVARS}/MokListRT-605dab50-e046-4300-abb6-3dd810dd8b23"), b"....another....");
    let check = made.signature();
    assert_eq!(check.fix.unwrap().command, "mokutil --import /var/lib/dkms/mok.pub");
    made.write("sys/firmware/efi/mok-variables/MokListRT", b"....certificate....");
    assert_eq!(made.signature().verdict, Verdict::Ok);
    let made = made.with_file(RELEASE, "pageonefs.ko.xz", b"compressed");
    assert!(made.signature().found.ends_with("can't be seen"), "its end is compressed");
    made.write("sys/module/module/parameters/sig_enforce", "Y\n");
    assert!(made.signature().found.contains("(module.sig_enforce)"));
}

fn mount() -> MountInfo {
    MountInfo { path: "/mnt/pageone".into(), device: 51, domain: "guests".into() }
}

#[test]
fn a_mount_has_its_domain_its_room_and_its_owner() {
    let files = |mib: u64| Ok(Files { sum: mib << 20, longer: None });
    let facts = || Facts { size: 4096 << 20, left: 1024 << 20, uid: 64055, mode: 0o40700, files: files(4096) };
    let check = of(&mount(), &facts());
    let expected = "/mnt/pageone: guests, 1024 of 4096 MiB left, for uid 64055";
    assert_eq!((check.verdict, check.found.as_str()), (Verdict::Ok, expected));
    let full = of(&mount(), &Facts { left: 100 << 20, ..facts() });
    assert!(full.remedy.unwrap().starts_with("no other guest fits"));
    let more = of(&mount(), &Facts { files: files(6144), ..facts() });
    assert!(more.found.ends_with("its files may come to 6144 MiB"), "{more:?}");
    assert_eq!(more.fix.unwrap().command, "mount -o remount,size=6144M '/mnt/pageone'");
    assert_eq!(of(&mount(), &Facts { size: 0, left: 0, ..facts() }).verdict, Verdict::Ok, "no limit");
    let (mut claim, mut fits) = (File::default(), File::default());
    (claim.size, claim.uid, fits.size) = (u64::MAX, 1000, 4096 << 20);
    let long = of(&mount(), &Facts { files: Ok(Files::of(&[fits, claim, claim], 4096 << 20)), ..facts() });
    assert!(long.found.ends_with("a file of uid 1000 is longer than that") && long.fix.is_none(), "{long:?}");
    assert_eq!(Files::of(&[claim; 3], 0).longer, None, "no limit");
    let open = of(&mount(), &Facts { mode: 0o41777, ..facts() });
    assert!(open.found.ends_with("and everybody else") && open.fix.unwrap().command == "chmod 700 '/mnt/pageone'");
    let older = of(&mount(), &Facts { files: Err(OpenError::Version { found: 1 }), ..facts() });
    assert!(older.verdict == Verdict::Blocks && older.found.contains("speaks version 1"), "{older:?}");
    let errno = rustix::io::Errno::PERM;
    let unasked = Facts { files: Err(OpenError::Open { path: "/mnt/pageone".into(), errno }), ..facts() };
    assert_eq!(of(&mount(), &unasked).verdict, Verdict::Ok, "this account may not ask for its files");
}

#[test]
fn the_daemon_must_see_the_mounts_and_have_the_right_to_manage_them() {
    let root = || Ok(Identity { capabilities: 1 << CAP_SYS_ADMIN, ..Identity::default() });
    let mounts = [mount()];
    assert_eq!(managed(&mounts, None).verdict, Verdict::Note);
    assert_eq!(managed(&mounts, Some((root(), Ok(vec![mount()])))).verdict, Verdict::Ok);
    let hidden = managed(&mounts, Some((root(), Ok(Vec::new()))));
    assert!(hidden.verdict == Verdict::Blocks && hidden.found == "it does not see /mnt/pageone", "{hidden:?}");
    let unit = managed(&mounts, Some((Ok(Identity::default()), Ok(vec![mount()]))));
    assert!(unit.verdict == Verdict::Blocks && unit.found.contains("without CAP_SYS_ADMIN"), "{unit:?}");
    let unknown = managed(&mounts, Some((root(), Err(io::ErrorKind::PermissionDenied.into()))));
    assert_eq!((unknown.verdict, unknown.remedy.as_deref()), (Verdict::Note, Some("run this as root")));
}

#[test]
fn this_host_has_a_remedy_for_all_that_is_missing() {
    for check in checks(Path::new("/"), &["/nonexistent".into()]) {
        assert_eq!(check.remedy.is_some(), check.verdict != Verdict::Ok, "{check:?}");
    }
    if super::mounts(Path::new("/")).is_empty() {
        println!("SKIPPED: mounts of this host: there are none");
    }
}
