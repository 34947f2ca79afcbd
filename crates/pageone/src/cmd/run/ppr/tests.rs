use super::*;

fn memory(line: &str) -> u64 {
    memory_of(&line.split(' ').map(OsString::from).collect::<Vec<_>>())
}

#[test]
fn memory_is_read_as_qemu_does() {
    assert_eq!(memory("-m 256"), 256 << 20);
    assert_eq!(memory("-cpu host -m 2G -smp 2"), 2 << 30);
    assert_eq!(memory("-m size=1.5G,slots=4,maxmem=8G"), 8 << 30);
    assert_eq!(memory("-m 512m,maxmem=1T"), 1 << 40);
    assert_eq!(memory("-smp 2"), DEFAULT_MEMORY);
    assert_eq!(memory("-m nonsense"), DEFAULT_MEMORY);
}

#[test]
fn a_guest_may_not_go_on_after_a_reset() {
    let check = |line: &str| check(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
    assert!(check("-m 256 -action panic=pause,reboot=reset").unwrap_err().to_string().contains("reset ends QEMU"));
    assert!(check("-m 256 --action reboot=reset").is_err());
    assert!(check("-m 256 -action reboot=shutdown,panic=pause -no-reboot -name reboot=reset").is_ok());
    assert!(check("-object memory-backend-memfd,id=a,size=1G -machine q35,mem-merge=off").is_ok(), "it only warns");
    assert!(check("").is_ok());
}

#[test]
fn a_pool_is_whole_and_keeps_its_length() {
    let fd = make_pool(1 << 20).unwrap();
    assert!(rustix::fs::ftruncate(&fd, 4096).is_err() && rustix::fs::ftruncate(&fd, 2 << 20).is_err());
    let map = memfd::map_shared(&fd, 1 << 20).unwrap();
    // SAFETY: `map.len()` bytes are mapped for reading and writing until the end of this test,
    // where `map` is dropped after the pool. The file is sealed and cannot shrink.
    let pool = unsafe { ppr::Pool::from_mapping(NonNull::new(map.as_ptr()).unwrap(), map.len()) }.unwrap();
    pool.validate().unwrap();
}

#[test]
fn only_qemu_gets_a_pool() {
    let mut command = Command::new("sh");
    let error = prepare(&mut command, OsStr::new("/bin/sh"), &[], Worker::Agent, None).err().unwrap();
    assert!(error.to_string().contains("guests, and sh is not QEMU"), "{error}");
    prepare(
        &mut command,
        OsStr::new("/usr/bin/qemu-system-x86_64"),
        &["-m".into(), "64".into()],
        Worker::Agent,
        Some(0.5),
    )
    .unwrap();
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    assert!(words.iter().any(|word| word.contains("ivshmem")) && words.iter().any(|word| word == "reboot=shutdown"));
    assert!(words.iter().any(|word| word.contains(QEMU_GUARD)), "nothing keeps QEMU from loadvm");
    let period = command.get_envs().find(|(name, _)| *name == wire::recycle::ENV_PERIOD).unwrap().1;
    assert_eq!(period, Some(OsStr::new("500")));
    // The device comes when the state is there.
    let mut command = Command::new("qemu-system-x86_64");
    let arguments: Vec<OsString> = "-M q35 -incoming defer".split(' ').map(OsString::from).collect();
    prepare(&mut command, OsStr::new("qemu-system-x86_64"), &arguments, Worker::Daemon, None).unwrap();
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    assert!(!words.iter().any(|word| word.contains("ivshmem") || word.contains(QEMU_GUARD)), "{words:?}");
    assert!(words.iter().any(|word| word.contains("pcie-root-port")), "{words:?}");
    let has = |wanted: &str| command.get_envs().any(|(name, value)| name == wanted && value.is_some());
    assert!(has(ENV_FILE_POOL) && has(ENV_FILE_QMP));
    assert!(!has(ENV_POOL) && !has(ENV_QMP), "an agent that comes later would ask the monitor, too");
}
