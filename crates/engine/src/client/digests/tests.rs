use super::*;

fn received(agent: &Conn) -> ToAgent {
    let mut packet = vec![0; wire::MAX_MESSAGE];
    let len = agent.recv(&mut packet, &mut Vec::new()).unwrap().unwrap();
    wire::decode_to_agent(&packet[..len]).unwrap()
}

fn answer(request: u64, digests: &[u64]) -> Digests {
    Digests { request, digests: digests.to_vec(), cpu_ns: 0 }
}

#[test]
fn answers_are_taken_in_any_order_and_each_once() {
    let (ours, agent) = Conn::pair().unwrap();
    let answers = Answers::default();
    let first = answers.ask(&ours, RegionId(3), 9, &[1, 2, 3, 7].map(PageNo)).unwrap();
    let second = answers.ask(&ours, RegionId(3), 9, &[PageNo(8)]).unwrap();
    let runs = vec![Run::new(PageNo(1), 3), Run::one(PageNo(7))];
    assert_eq!(received(&agent), ToAgent::Digest(Digest { request: first, region: RegionId(3), seed: 9, runs }));
    answers.put(answer(second, &[5]));
    answers.put(answer(first, &[1, 2, 3]));
    answers.put(answer(first, &[6, 6, 6]));
    answers.put(answer(second + 1, &[4]));
    assert_eq!(answers.wait(first), Some(vec![1, 2, 3]));
    assert_eq!(answers.wait(second), Some(vec![5]));
    assert!(answers.state.lock().answers.is_empty() && answers.state.lock().asked.is_empty());
}

#[test]
fn an_agent_that_does_not_answer_is_not_asked_for_a_while() {
    let (ours, _agent) = Conn::pair().unwrap();
    let answers = Answers::default();
    let request = answers.ask(&ours, RegionId(1), 0, &[PageNo(1)]).unwrap();
    assert_eq!(answers.wait(request), None);
    assert_eq!(answers.ask(&ours, RegionId(1), 0, &[PageNo(1)]), None);
    answers.state.lock().resume = Some(Instant::now());
    assert!(answers.ask(&ours, RegionId(1), 0, &[PageNo(1)]).is_some());
    answers.forget();
    answers.put(answer(request, &[1]));
    assert!(answers.state.lock().answers.is_empty(), "too late");
}

#[test]
fn nobody_waits_for_a_client_that_is_gone() {
    let (ours, _agent) = Conn::pair().unwrap();
    let answers = Answers::default();
    let request = answers.ask(&ours, RegionId(1), 0, &[PageNo(1)]).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| answers.wait(request));
        answers.close();
        assert_eq!(waiting.join().unwrap(), None);
    });
    assert_eq!(answers.ask(&ours, RegionId(1), 0, &[PageNo(1)]), None);
}
