/* NCCL's interface over a TCP connection, for memory of the host: what channels use of it, and as slow to say so.
 *
 * A call is handed to the "stream" a moment after it has returned ncclInProgress. A send waits for its receive, as a
 * kernel does, and one of another size hangs. When the peer is dead everything hangs until the abort, as over NVLink,
 * or is an error (stubNoticesDeath), as over a network. */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { Success = 0, SystemError = 2, InvalidArgument = 4, RemoteError = 6, InProgress = 7 };
enum { MAGIC = 0x53545542, LAUNCH_MICROSECONDS = 200, POLL_MILLISECONDS = 5 };

typedef struct { char internal[128]; } UniqueId;
typedef struct { int magic, port, listener; } Address;
typedef struct { size_t size; unsigned magic, version; int blocking, cga, min_ctas, max_ctas; } Config;
typedef struct { atomic_long launched, done; } Stream;
typedef struct Operation { char *bytes; size_t size; int is_send; Stream *stream; struct Operation *next; } Operation;
typedef struct {
  int rank, fd;
  Address address;
  atomic_int state, is_aborted;
  pthread_t runner, launcher;
  int has_launcher;
  pthread_mutex_t lock;
  Operation *calls, *queue;
} Comm;

static atomic_int notices_death, version = 22700, delays_abort;
static _Thread_local Comm *grouped;

void stubNoticesDeath(int value) { notices_death = value; }
void stubSetVersion(int value) { version = value; }
void stubDelaysAbort(int microseconds) { delays_abort = microseconds; }
Stream *stubNewStream(void) { return calloc(1, sizeof(Stream)); }
long stubLaunched(Stream *stream) { return stream->launched; }
long stubDone(Stream *stream) { return stream->done; }

int ncclGetVersion(int *value) { *value = version; return Success; }
const char *ncclGetErrorString(int state) {
  return state == RemoteError ? "remote process exited" : state == InvalidArgument ? "invalid argument" : "system error";
}

int ncclGetUniqueId(UniqueId *id) {
  struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof name;
  Address made = {MAGIC, 0, socket(AF_INET, SOCK_STREAM, 0)};
  if (bind(made.listener, (void *)&name, length) || listen(made.listener, 1)) return SystemError;
  getsockname(made.listener, (void *)&name, &length);
  made.port = name.sin_port;
  memset(id, 0, sizeof *id);
  memcpy(id, &made, sizeof made);
  return Success;
}

static void hang(Comm *comm) {
  while (!comm->is_aborted) usleep(1000);
}

static int wait_for(Comm *comm, int fd, short events) {
  struct pollfd asked = {fd, events, 0};
  while (!comm->is_aborted)
    if (poll(&asked, 1, POLL_MILLISECONDS) > 0) return 1;
  return 0;
}

static int move(Comm *comm, char *bytes, size_t size, int is_send) {
  while (size) {
    if (!wait_for(comm, comm->fd, is_send ? POLLOUT : POLLIN)) return 0;
    ssize_t moved = is_send ? send(comm->fd, bytes, size, MSG_NOSIGNAL) : recv(comm->fd, bytes, size, 0);
    if (moved <= 0 && !(moved < 0 && errno == EAGAIN)) {
      if (notices_death) comm->state = RemoteError;
      hang(comm);
      return 0;
    }
    if (moved > 0) bytes += moved, size -= moved;
  }
  return 1;
}

static int is_joined(Comm *comm) {
  struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (comm->rank == 0) {
    if (!wait_for(comm, comm->address.listener, POLLIN)) return 0;
    comm->fd = accept(comm->address.listener, NULL, NULL);
  } else {
    name.sin_port = comm->address.port;
    comm->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (comm->address.magic != MAGIC || connect(comm->fd, (void *)&name, sizeof name)) {
      comm->state = SystemError;
      return 0;
    }
  }
  fcntl(comm->fd, F_SETFL, O_NONBLOCK);
  return 1;
}

static void *run(void *made) {
  Comm *comm = made;
  if (!is_joined(comm)) return NULL;
  comm->state = Success;
  while (!comm->is_aborted) {
    pthread_mutex_lock(&comm->lock);
    Operation *next = comm->queue;
    if (next) comm->queue = next->next;
    pthread_mutex_unlock(&comm->lock);
    if (!next) { usleep(50); continue; }
    size_t wanted = next->size;
    if (!move(comm, (char *)&wanted, sizeof wanted, !next->is_send)) return NULL;
    if (wanted != next->size) { hang(comm); return NULL; }
    if (!move(comm, next->bytes, next->size, next->is_send)) return NULL;
    next->stream->done++;
    free(next);
  }
  return NULL;
}

int ncclCommInitRankConfig(Comm **made, int num_ranks, UniqueId id, int rank, Config *config) {
  if (num_ranks != 2 || config->magic != 0xcafebeef || config->size < sizeof(Config) || config->blocking != 0 ||
      config->max_ctas < 1 || config->cga != -2147483647 - 1)
    return InvalidArgument;
  Comm *comm = *made = calloc(1, sizeof(Comm));
  comm->rank = rank;
  comm->fd = -1;
  comm->state = InProgress;
  memcpy(&comm->address, &id, sizeof(Address));
  pthread_mutex_init(&comm->lock, NULL);
  pthread_create(&comm->runner, NULL, run, comm);
  return InProgress;
}

int ncclCommGetAsyncError(Comm *comm, int *state) { *state = comm->state; return Success; }

int ncclGroupStart(void) { grouped = NULL; return Success; }

static int call(char *bytes, size_t size, int is_send, Comm *comm, Stream *stream) {
  if (comm->state == InProgress) return InvalidArgument;
  Operation **last = &comm->calls, *operation = malloc(sizeof *operation);
  *operation = (Operation){bytes, size, is_send, stream, NULL};
  while (*last) last = &(*last)->next;
  *last = operation;
  grouped = comm;
  return Success;
}
int ncclSend(char *bytes, size_t size, int type, int peer, Comm *comm, Stream *stream) {
  return type == 1 && peer == 1 - comm->rank ? call(bytes, size, 1, comm, stream) : InvalidArgument;
}
int ncclRecv(char *bytes, size_t size, int type, int peer, Comm *comm, Stream *stream) {
  return type == 1 && peer == 1 - comm->rank ? call(bytes, size, 0, comm, stream) : InvalidArgument;
}

static void *launch(void *made) {
  Comm *comm = made;
  usleep(LAUNCH_MICROSECONDS);
  pthread_mutex_lock(&comm->lock);
  Operation **last = &comm->queue;
  while (*last) last = &(*last)->next;
  *last = comm->calls;
  for (Operation *each = comm->calls; each; each = each->next) each->stream->launched++;
  comm->calls = NULL;
  pthread_mutex_unlock(&comm->lock);
  int expected = InProgress;
  atomic_compare_exchange_strong(&comm->state, &expected, Success);
  return NULL;
}

int ncclGroupEnd(void) {
  Comm *comm = grouped;
  if (!comm) return Success;
  if (comm->has_launcher) pthread_join(comm->launcher, NULL);
  int expected = Success;
  if (!atomic_compare_exchange_strong(&comm->state, &expected, InProgress)) return comm->state;
  comm->has_launcher = 1;
  pthread_create(&comm->launcher, NULL, launch, comm);
  return InProgress;
}

int ncclCommAbort(Comm *comm) {
  usleep(delays_abort);
  comm->is_aborted = 1;
  if (comm->has_launcher) pthread_join(comm->launcher, NULL);
  pthread_join(comm->runner, NULL);
  close(comm->fd);
  if (comm->rank == 0) close(comm->address.listener);
  free(comm);
  return Success;
}
