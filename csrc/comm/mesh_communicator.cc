#include "usbyte/mesh_communicator.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <utility>

#include "usbyte/error.h"
#include "usbyte/mesh_simulator.h"

namespace usbyte {
namespace {

constexpr int kInFlight = 2;  // of one line: the next is on its way when one ends

using Spans = std::vector<Span>;

/// The rank's part of each span among so many.
Spans shards(const Spans& spans, int64_t width, int part, int parts) {
  Spans out;
  for (const Span& span : spans) {
    const Block own = shard({0, span.count}, part, parts);
    if (own.numel() == 0) continue;
    out.push_back({static_cast<std::byte*>(span.data) + own.begin * width, own.numel()});
  }
  return out;
}

std::string problem(const Request& request, const Topology& topology) {
  if (request.kind != Collective::all_reduce || request.schedule->kind != request.kind) {
    return "only all_reduces have schedules, of all_reduces";
  }
  if (request.reduce != ReduceOp::sum || request.scale != 1) {
    return "all_reduces with a schedule are sums, without a scale";
  }
  if (request.order) return "all_reduces with a schedule are of memory of the host";
  try {
    request.schedule->validate(topology);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}

/// A request on its way.
struct Job {
  struct Phase {
    int dimension;
    Collective kind;
    Spans spans;
  };

  Request request;  // as it was launched
  Completion done;
  std::vector<std::vector<Phase>> chunks;
  std::vector<int> passed;  // phases, by chunk
  int64_t left = 0;         // phases
  int in_flight = 0;
};

std::shared_ptr<Job> make_job(const Request& request, Completion done, const Topology& topology,
                              const std::vector<int>& coordinates) {
  auto job = std::make_shared<Job>();
  job->request = request;
  job->done = std::move(done);
  const int64_t width = itemsize(request.dtype);
  const auto& routes = request.schedule->routes;
  for (size_t c = 0; c < routes.size(); ++c) {
    Spans spans = shards(request.recv, width, static_cast<int>(c), static_cast<int>(routes.size()));
    std::vector<Job::Phase>& phases = job->chunks.emplace_back();
    for (int d : routes[c]) {
      const auto at = static_cast<size_t>(d);
      phases.push_back({d, Collective::reduce_scatter, spans});
      spans = shards(spans, width, coordinates[at], topology.dimensions[at].size);
    }
    for (size_t p = phases.size(); p-- > 0;) {
      phases.push_back({phases[p].dimension, Collective::all_gather, phases[p].spans});
    }
    job->left += std::ssize(phases);
  }
  job->passed.resize(routes.size());
  return job;
}

}  // namespace

// Ownership: `mutex` guards all but what is constant, and is never held while a communicator or a
// completion is called. Of a line one thread at a time launches, who has set `launching`.
// Completions hold the state alive.
struct MeshCommunicator::State : std::enable_shared_from_this<State> {
  struct Task {
    std::shared_ptr<Job> job;
    size_t chunk;
    int phase;
  };
  struct Line {
    std::shared_ptr<Communicator> communicator;
    std::deque<Task> waiting;
    int in_flight = 0;
    bool launching = false;
  };

  State(Topology t, std::shared_ptr<Communicator> f,
        std::vector<std::shared_ptr<Communicator>> communicators)
      : topology(std::move(t)), flat(std::move(f)) {
    topology.validate();
    if (!flat || flat->size() != topology.ranks() || std::ssize(communicators) != topology.ndim()) {
      throw UsageError("a mesh of " + std::to_string(topology.ranks()) + " ranks in " +
                       std::to_string(topology.ndim()) + " dimensions got " +
                       std::to_string(communicators.size()) + " lines and " +
                       (flat ? std::to_string(flat->size()) : "no") + " ranks");
    }
    coordinates = topology.coordinates(flat->rank());
    for (size_t d = 0; d < communicators.size(); ++d) {
      const Dimension& dimension = topology.dimensions[d];
      const auto& line = communicators[d];
      const int ranks = line ? line->size() : 1, place = line ? line->rank() : 0;
      if (ranks != dimension.size || place != coordinates[d]) {
        throw UsageError("the line of dimension '" + dimension.name + "' has rank " +
                         std::to_string(place) + " of " + std::to_string(ranks) + ", not " +
                         std::to_string(coordinates[d]) + " of " + std::to_string(dimension.size));
      }
      lines.emplace_back().communicator = line;
    }
  }

  const Topology topology;
  const std::shared_ptr<Communicator> flat;
  std::vector<int> coordinates;  // constant, too

  std::mutex mutex;
  std::condition_variable idle;
  std::vector<Line> lines;                // by dimension; their communicators are constant
  std::deque<std::shared_ptr<Job>> jobs;  // not complete
  std::string fault;                      // final

  void start(std::shared_ptr<Job> job) {
    {
      std::lock_guard lock(mutex);
      for (size_t d = 0; d < lines.size(); ++d) {
        for (const ChunkPhase& next : job->request.schedule->order[d]) {
          lines[d].waiting.push_back({job, static_cast<size_t>(next.chunk), next.phase});
        }
      }
      jobs.push_back(std::move(job));
    }
    go_on();
  }

  /// Launches what can be on all lines, and completes what is over.
  void go_on() {
    for (bool passes = true; passes;) {
      passes = false;
      for (size_t d = 0; d < lines.size(); ++d) passes |= launch_on(d);
    }
    std::unique_lock lock(mutex);
    for (std::shared_ptr<Job> job; (job = over());) {
      const std::string why = job->left > 0 ? fault : "";
      lock.unlock();
      // Made before the call, whose end would else still touch the text that others read.
      std::exception_ptr error;
      if (!why.empty()) error = std::make_exception_ptr(FaultError(why));
      job->done(std::move(error));
      lock.lock();
    }
    if (jobs.empty()) idle.notify_all();
  }

  /// Whether phases passed at once, so that others may be launchable now.
  bool launch_on(size_t d) {
    Line& line = lines[d];
    bool passes = false;
    std::unique_lock lock(mutex);
    while (!line.launching && fault.empty() && !line.waiting.empty() &&
           line.in_flight < kInFlight) {
      const Task task = line.waiting.front();
      if (task.job->passed[task.chunk] != task.phase) break;
      line.waiting.pop_front();
      const Job::Phase& phase = task.job->chunks[task.chunk][static_cast<size_t>(task.phase)];
      ++line.in_flight;
      ++task.job->in_flight;
      line.launching = true;
      lock.unlock();
      if (phase.spans.empty()) {  // on all ranks of the line
        count(d, task, nullptr);
        passes = true;
      } else {
        Request request;
        request.kind = phase.kind;
        request.dtype = task.job->request.dtype;
        request.recv = phase.spans;
        line.communicator->launch(
            request, [self = shared_from_this(), d, task](const std::exception_ptr& error) {
              self->count(d, task, error);
              self->go_on();
            });
      }
      lock.lock();
      line.launching = false;
    }
    return passes;
  }

  /// A phase is over.
  void count(size_t d, const Task& task, const std::exception_ptr& error) {
    const std::string why = error ? what(error) : "";
    std::lock_guard lock(mutex);
    --lines[d].in_flight;
    --task.job->in_flight;
    if (!error) {
      ++task.job->passed[task.chunk];
      --task.job->left;
    } else if (fault.empty()) {
      fault = "phase " + std::to_string(task.phase) + " of chunk " + std::to_string(task.chunk) +
              ", over dimension '" + topology.dimensions[d].name + "', failed: " + why;
    }
  }

  /// With the lock: takes a job out that completes now; null if none does. In order of launches.
  std::shared_ptr<Job> over() {
    if (jobs.empty()) return nullptr;
    const Job& first = *jobs.front();
    if (first.in_flight > 0 || (first.left > 0 && fault.empty())) return nullptr;
    std::shared_ptr<Job> out = std::move(jobs.front());
    jobs.pop_front();
    if (first.left > 0) {
      for (Line& line : lines) {
        std::erase_if(line.waiting, [&](const Task& task) { return task.job == out; });
      }
    }
    return out;
  }
};

MeshCommunicator::MeshCommunicator(Topology topology, std::shared_ptr<Communicator> flat,
                                   std::vector<std::shared_ptr<Communicator>> lines)
    : state_(std::make_shared<State>(std::move(topology), std::move(flat), std::move(lines))) {}

MeshCommunicator::~MeshCommunicator() {
  std::unique_lock lock(state_->mutex);
  state_->idle.wait(lock, [this] { return state_->jobs.empty(); });
}

int MeshCommunicator::rank() const { return state_->flat->rank(); }
int MeshCommunicator::size() const { return state_->flat->size(); }

void MeshCommunicator::launch(const Request& request, Completion done) {
  if (!request.schedule) return state_->flat->launch(request, std::move(done));
  const std::string why = problem(request, state_->topology);
  if (!why.empty()) return done(std::make_exception_ptr(UsageError(why)));
  state_->start(make_job(request, std::move(done), state_->topology, state_->coordinates));
}

void MeshCommunicator::abort() {
  state_->flat->abort();
  for (const State::Line& line : state_->lines) {
    if (line.communicator) line.communicator->abort();
  }
}

}  // namespace usbyte
