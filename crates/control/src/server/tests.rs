use std::path::PathBuf;
use std::sync::Mutex;

use super::*;
use crate::client::{self, Error};
use crate::sharing::{Cell, DomainSharing, Pair, RegionMap};

/// A daemon with one client, process 7, that can be detached, and frozen once at a time.
#[derive(Default)]
struct Fake {
    frozen: Arc<Mutex<bool>>,
    marked: Arc<Mutex<Option<ChangeLog>>>,
}

struct Frozen {
    frozen: Arc<Mutex<bool>>,
    marked: Arc<Mutex<Option<ChangeLog>>>,
}

impl Freeze for Frozen {
    fn changes(&mut self) -> Option<ChangeLog> {
        self.marked.lock().unwrap().take()
    }

    fn mark(&self, label: &str, written: Option<&[(u64, u64)]>) {
        let changed = written.unwrap_or_default().to_vec();
        *self.marked.lock().unwrap() = Some(ChangeLog { label: label.into(), changed });
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        *self.frozen.lock().unwrap() = false;
    }
}

fn known(pid: i32) -> Result<(), Refusal> {
    if pid == 7 { Ok(()) } else { Err(Refusal::Unknown(format!("process {pid} is no client"))) }
}

/// A detach that works, waits twice and ends.
struct Steps(Mutex<u64>);

impl Detaching for Steps {
    fn step(&self) -> DetachStep {
        let mut left = self.0.lock().unwrap();
        let step = match *left {
            3 => DetachStep::Works,
            0 => DetachStep::Done { pages_retained: 5 },
            pages => DetachStep::Waits { pages, at_most: Duration::from_millis(1500) },
        };
        *left = left.saturating_sub(1);
        step
    }
}

impl Handler for Fake {
    type Access = ();
    type Detaching = Steps;
    type Freeze = Frozen;

    fn is_in_place(&self) -> bool {
        true
    }

    fn access(&self, _: &Peer) {}

    fn status(&self, (): &()) -> Status {
        let mut status = Status::default();
        status.metrics.pages_shared = 5;
        status
    }

    fn dirty(&self, pids: &[i32], (): &()) -> Result<Vec<DirtyStatus>, Refusal> {
        pids.iter().try_for_each(|&pid| known(pid))?;
        Ok(vec![DirtyStatus { pid: 7, ..DirtyStatus::default() }])
    }

    fn map(&self, pid: i32, (): &()) -> Result<ClientMap, Refusal> {
        known(pid)?;
        let cells = vec![Cell { merged: 3, ..Cell::default() }];
        let regions = vec![RegionMap { start: 1 << 40, pages: 3, cells }];
        Ok(ClientMap { pid, regions, ..ClientMap::default() })
    }

    fn sharing(&self, (): &()) -> SharingMatrix {
        let pairs = vec![Pair { a: 0, b: 1, pages: 9 }];
        SharingMatrix { domains: vec![DomainSharing { pairs, ..DomainSharing::default() }] }
    }

    fn detach(&self, pid: i32, (): &()) -> Result<Steps, Refusal> {
        known(pid)?;
        Ok(Steps(Mutex::new(3)))
    }

    fn pause(&self, pid: i32, (): &()) -> Result<(), Refusal> {
        known(pid)
    }

    fn resume(&self, pid: i32, (): &()) -> Result<(), Refusal> {
        known(pid)?;
        Err(Refusal::Busy("it waits for an incoming migration".into()))
    }

    fn freeze(&self, pid: i32, (): &()) -> Result<Frozen, Refusal> {
        known(pid)?;
        let mut frozen = self.frozen.lock().unwrap();
        if std::mem::replace(&mut *frozen, true) {
            return Err(Refusal::Busy("another checkpoint is being taken".into()));
        }
        Ok(Frozen { frozen: self.frozen.clone(), marked: self.marked.clone() })
    }
}

#[test]
fn what_a_daemon_is_asked_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let places = [dir.path().join("nobody"), dir.path().to_path_buf()];
    assert!(matches!(client::status(&places), Err(Error::NoDaemon(_))));
    serve(Arc::new(Fake::default()), dir.path()).unwrap();

    assert_eq!(client::status(&places).unwrap().metrics.pages_shared, 5);
    assert_eq!(client::dirty(&places, &[]).unwrap()[0].pid, 7);
    assert!(matches!(client::dirty(&places, &[8]), Err(Error::NoClient(why)) if why.contains('8')));
    let map = client::map(&places, 7).unwrap();
    assert_eq!((map.pid, map.regions[0].cells[0].merged, map.regions[0].cells[0].other), (7, 3, 0));
    assert!(matches!(client::map(&places, 8), Err(Error::NoClient(_))));
    assert_eq!(client::sharing(&places).unwrap().domains[0].pairs, [Pair { a: 0, b: 1, pages: 9 }]);
    assert!(matches!(client::detach(&places, 8, |_, _| {}), Err(Error::NoClient(_))));
    let mut waits = Vec::new();
    assert_eq!(client::detach(&places, 7, |pages, seconds| waits.push((pages, seconds))).unwrap(), 5);
    assert_eq!(waits, [(2, 2), (1, 2)]);
}

#[test]
fn a_freeze_lasts_as_long_as_its_connection_and_keeps_a_mark() {
    let dir = tempfile::tempdir().unwrap();
    let places = [dir.path().to_path_buf()];
    assert!(client::Freeze::ask(&places, 7, Duration::ZERO).unwrap().is_none(), "no daemon");
    serve(Arc::new(Fake::default()), dir.path()).unwrap();

    assert!(client::Freeze::ask(&places, 8, Duration::ZERO).unwrap().is_none(), "no client");
    let first = client::Freeze::ask(&places, 7, Duration::ZERO).unwrap().unwrap();
    assert!(first.changes.is_none() && first.lasts());
    assert!(client::Freeze::ask(&places, 7, Duration::ZERO).is_err(), "it is frozen");
    first.mark("a".into(), Some(vec![(4096, 8192)])).unwrap();
    drop(first);
    let second = client::Freeze::ask(&places, 7, Duration::ZERO).unwrap().unwrap();
    assert_eq!(second.changes, Some(ChangeLog { label: "a".into(), changed: vec![(4096, 8192)] }));
}

#[test]
fn a_line_that_is_no_request_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    serve(Arc::new(Fake::default()), dir.path()).unwrap();
    let mut stream = UnixStream::connect(dir.path().join(SOCKET)).unwrap();
    stream.write_all(b"nonsense\n").unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    assert!(answer.contains("not a request: expected"), "{answer}");
}

#[test]
fn a_request_of_a_later_command_is_answered_with_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    serve(Arc::new(Fake::default()), dir.path()).unwrap();
    let mut stream = UnixStream::connect(dir.path().join(SOCKET)).unwrap();
    stream.write_all(b"{\"later\":[7]}\n").unwrap();
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).unwrap();
    assert!(
        answer.contains("not a request that this daemon knows") && answer.contains("restart the daemon"),
        "{answer}"
    );
}

#[test]
fn a_daemon_of_another_build_is_told_from_one_that_ends() {
    let dir = tempfile::tempdir().unwrap();
    let places = [dir.path().to_path_buf()];
    let listener = UnixListener::bind(dir.path().join(SOCKET)).unwrap();
    let ask = |answer: &'static str| {
        let asked = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut stream = listener.accept().unwrap().0;
                // Else the command may meet a closed connection before it has asked.
                BufReader::new(&stream).read_line(&mut String::new()).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            });
            client::status(&places)
        });
        asked.unwrap_err()
    };
    for answer in [
        "{\"failed\":\"not a request: unknown variant `status`, expected `state`\"}\n",
        "{\"later\":5}\n",
        "{\"status\":{\"governor\":5}}\n",
    ] {
        let why = ask(answer);
        assert!(why.to_string().contains("different builds: restart the daemon"), "{answer} {why}");
    }
    assert!(matches!(ask("{\"status\":{\"gover"), Error::Broken(_)));
    assert!(matches!(ask(""), Error::Broken(_)));
    let other = ask("\"done\"\n");
    assert!(matches!(&other, Error::Unexpected(answer) if answer == "Done"), "an answer to something else: {other}");
}

#[test]
fn one_connection_too_many_is_told_so() {
    let dir = tempfile::tempdir().unwrap();
    serve(Arc::new(Fake::default()), dir.path()).unwrap();
    let connect = || UnixStream::connect(dir.path().join(SOCKET)).unwrap();
    // This user is the daemon's owner, who has the most.
    let mut kept: Vec<_> = (0..256).map(|_| connect()).collect();
    let mut answer = String::new();
    BufReader::new(connect()).read_line(&mut answer).unwrap();
    assert!(answer.contains("too many connections"), "{answer}");
    kept.clear();
    // The threads take a moment to see that.
    let deadline = Instant::now() + Duration::from_secs(60);
    while client::status(&[dir.path().to_path_buf()]).is_err() {
        assert!(Instant::now() < deadline, "connections that are closed count no more");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Does something as another user, in a thread of its own.
fn by<T: Send>(uid: u32, does: impl FnOnce() -> T + Send) -> T {
    let user = rustix::process::Uid::from_raw(uid);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            does()
        });
        thread.join().unwrap()
    })
}

/// What a daemon of another user is asked, and the error that `ask` gives to this user.
fn asked_by(uid: u32, ask: fn(&[PathBuf]) -> Error) -> (String, Error) {
    const OTHER: u32 = 65534;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join(SOCKET);
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(&dir, open.clone()).unwrap();
    let listener = by(OTHER, || UnixListener::bind(&socket).unwrap());
    std::fs::set_permissions(&socket, open).unwrap();
    let asked = std::thread::spawn(move || {
        let mut asked = String::new();
        BufReader::new(listener.accept().unwrap().0).read_line(&mut asked).unwrap();
        asked
    });
    let error = by(uid, || ask(&[dir.path().into()]));
    assert!(!matches!(error, Error::Foreign { uid, .. } if uid != OTHER), "{error}");
    (asked.join().unwrap(), error)
}

#[test]
fn a_daemon_of_another_user_is_asked_nothing_and_not_believed() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: only root can become another user");
    }
    let freeze = |places: &[PathBuf]| client::Freeze::ask(places, 7, Duration::ZERO).err().unwrap();
    let (asked, error) = asked_by(65533, |places| client::status(places).unwrap_err());
    assert!(asked.is_empty() && matches!(error, Error::Foreign { .. }), "{asked}, {error}");
    let (asked, error) = asked_by(65533, |places| client::detach(places, 7, |_, _| {}).unwrap_err());
    assert!(asked.is_empty() && matches!(error, Error::Foreign { .. }), "{asked}, {error}");
    let (asked, error) = asked_by(65533, freeze);
    assert!(asked.is_empty() && matches!(error, Error::Foreign { .. }), "{asked}, {error}");
    // Root has named the directory: it is shown what is said, and nothing is stored by it.
    let (asked, error) = asked_by(0, |places| client::status(places).unwrap_err());
    assert!(asked.contains("status") && matches!(error, Error::Broken(_)), "{asked}, {error}");
    let (asked, error) = asked_by(0, freeze);
    assert!(asked.is_empty() && matches!(error, Error::Foreign { .. }), "{asked}, {error}");
}

#[test]
fn an_endless_answer_ends_and_a_refusal_is_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let places = [dir.path().to_path_buf()];
    let listener = UnixListener::bind(dir.path().join(SOCKET)).unwrap();
    let ask = |part: Vec<u8>, times: usize| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut stream = listener.accept().unwrap().0;
                BufReader::new(&stream).read_line(&mut String::new()).unwrap();
                let _ = (0..times).try_for_each(|_| stream.write_all(&part)).and_then(|()| stream.write_all(b"\n"));
            });
            client::status(&places).unwrap_err()
        })
    };
    let error = ask(vec![b'"'; 1 << 20], 200);
    assert!(matches!(&error, Error::Broken(why) if why.to_string().contains("at most")), "{error:?}");
    let error = ask(br#"{"failed":"no\nFORGED\u001b[2J"}"#.to_vec(), 1);
    assert_eq!(error.to_string(), "noFORGED[2J");
}
