//! A guest with databases: Linux, and on each disk ext4 with SQLite (`guest/database/init`).

use std::os::unix::fs::PermissionsExt;

use super::*;

const INIT: &[u8] = include_bytes!("../../../../guest/database/init");
/// Modules of its kernel, in any order.
const MODULES: [&str; 6] =
    ["virtio", "virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", "virtio_blk"];

/// The words of QEMU up to its disks. `None`: this machine lacks a part, which is said.
pub(super) fn words(place: &Place) -> Option<Vec<String>> {
    let words = Guest::words(MEMORY).inspect_err(|why| skipped(why)).ok()?;
    let kernel = PathBuf::from(&words[words.iter().position(|word| word == "-kernel").unwrap() + 1]);
    let archive = place.path("database.cpio");
    archive_of(&kernel, &archive).inspect_err(|why| skipped(why)).ok()?;
    let base = "qemu-system-x86_64 -accel tcg,tb-size=64 -cpu qemu64,-cx16 -m 160 -display none -nodefaults \
                -no-user-config -no-reboot -chardev stdio,id=console,signal=off -serial chardev:console -append";
    let mut words: Vec<String> = base.split_whitespace().map(String::from).collect();
    words.push("console=ttyS0 quiet panic=-1 no_timer_check mitigations=off rootfstype=ramfs".into());
    words.extend(["-kernel".into(), kernel.display().to_string(), "-initrd".into(), archive.display().to_string()]);
    Some(words)
}

/// Busybox, two programs with their libraries, and the modules of the kernel.
fn archive_of(kernel: &Path, archive: &Path) -> Result<(), String> {
    let run = |command: &mut Command| {
        let out = command.output().map_err(|why| format!("{:?}: {why}", command.get_program()))?;
        Ok::<_, String>(String::from_utf8_lossy(&out.stdout).into_owned())
    };
    let root = tempfile::tempdir().unwrap();
    let put = |from: &Path, to: &str| {
        let to = root.path().join(to.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, to).map_err(|why| format!("{}: {why}: scripts/deps.sh test installs it", from.display()))
    };
    let find = |name, package| testguest::find::find_program(name, package).map_err(|why| why.to_string());
    put(&testguest::find::find_busybox().map_err(|why| why.to_string())?, "bin/busybox")?;
    for program in [find("sqlite3", "sqlite3")?, "/usr/sbin/mkfs.ext4".into()] {
        put(&program, &format!("usr/bin/{}", program.file_name().unwrap().display()))?;
        let libraries = run(Command::new("ldd").arg(&program))?;
        for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
            put(Path::new(library), library)?;
        }
    }
    let modules = kernel.parent().unwrap().join("modules");
    if !modules.join("virtio_blk.ko").exists() {
        return Err(format!("{} has no virtio_blk.ko: scripts/deps.sh test fetches it", modules.display()));
    }
    for name in MODULES.map(|name| format!("{name}.ko")).iter().filter(|name| modules.join(name).exists()) {
        put(&modules.join(name), &format!("modules/{name}"))?;
    }
    for directory in ["dev", "proc", "sys"] {
        std::fs::create_dir_all(root.path().join(directory)).unwrap();
    }
    std::fs::write(root.path().join("init"), INIT).unwrap();
    std::fs::set_permissions(root.path().join("init"), PermissionsExt::from_mode(0o755)).unwrap();
    let pack = "cd \"$1\" && mknod dev/console c 5 1 && find . | busybox cpio -o -H newc > \"$2\" 2> /dev/null";
    let packed = Command::new("sh").args(["-c", pack, "sh"]).arg(root.path()).arg(archive).status().unwrap();
    if packed.success() { Ok(()) } else { Err("busybox cannot pack the guest's archive".into()) }
}
