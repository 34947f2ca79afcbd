use super::*;

#[test]
fn a_loader_that_does_not_go_on_is_not_waited_for_and_one_that_does_is() {
    let pid = std::process::id() as i32;
    let loads = |work: fn()| {
        let (began, begins) = std::sync::mpsc::channel();
        let loader = std::thread::Builder::new().name(LOADER.into()).spawn(move || {
            began.send(()).unwrap();
            let end = Instant::now() + Duration::from_millis(1200);
            while Instant::now() < end {
                work();
            }
        });
        begins.recv().unwrap();
        let waited = wait_until_loaded(pid, Duration::from_millis(300));
        loader.unwrap().join().unwrap();
        waited
    };
    let nap = || std::thread::sleep(Duration::from_secs(1));
    let error = loads(nap).unwrap_err();
    assert!(matches!(error, SaveError::Loading { .. }), "{error}");
    assert!(error.to_string().starts_with(&format!("the memory of guest {pid} is being loaded, and")), "{error}");
    loads(std::thread::yield_now).unwrap();
    wait_until_loaded(pid, Duration::ZERO).unwrap();
}
