use super::*;

#[test]
fn a_loader_that_does_not_go_on_is_not_waited_for_and_one_that_does_is() {
    let pid = std::process::id() as i32;
    let loads = |stuck, mut goes_on: Box<dyn FnMut() -> bool + Send>| {
        let (began, begins) = std::sync::mpsc::channel();
        let loader = std::thread::Builder::new().name(LOADER.into()).spawn(move || {
            began.send(()).unwrap();
            while goes_on() {}
        });
        begins.recv().unwrap();
        (wait_until_loaded(pid, stuck), loader.unwrap())
    };
    let (end, ends) = std::sync::mpsc::channel::<()>();
    let (waited, loader) = loads(Duration::from_millis(300), Box::new(move || ends.recv().is_ok()));
    drop(end);
    loader.join().unwrap();
    let error = waited.unwrap_err();
    assert!(matches!(error, SaveError::Loading { .. }), "{error}");
    assert!(error.to_string().starts_with(&format!("the memory of guest {pid} is being loaded, and")), "{error}");
    // A busy machine may hold it up for a while.
    let end = Instant::now() + Duration::from_secs(6);
    let works = move || {
        std::thread::yield_now();
        Instant::now() < end
    };
    let (waited, loader) = loads(Duration::from_secs(4), Box::new(works));
    waited.unwrap();
    loader.join().unwrap();
    wait_until_loaded(pid, Duration::ZERO).unwrap();
}
