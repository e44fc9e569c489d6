/* A TCP forwarder that makes each answer come later, and costs next to nothing: the latency of a far-away store.
 *
 *     delay_line LISTEN_PORT TARGET_PORT DELAY_US        from all addresses to 127.0.0.1
 *
 * A turn of the conversation, the first bytes from the client after the server spoke, is held for DELAY_US; everything
 * else passes at once. For a protocol of request and answer (HTTP/1.1) that is one round trip a request, and it leaves
 * the bulk of the bytes alone: the answer goes from socket to socket by splice(2), without a copy. (toxiproxy holds
 * every chunk of the answer instead: the same delay, at 2 CPU seconds per GB on the machine that is being measured.)
 *
 * Prints "ready" once it listens. Two threads a connection, blocking; a connection ends when either side closes.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PIPE_BYTES = 1 << 20, REQUEST_BYTES = 1 << 20 };

struct conversation {
    int client, server;
    atomic_bool server_spoke; /* since the last byte of the client was passed on */
    pthread_t requests;
};

static struct timespec delay;
static in_port_t target_port;

static int write_all(int fd, const char *data, size_t count) {
    while (count > 0) {
        ssize_t put = send(fd, data, count, MSG_NOSIGNAL);
        if (put <= 0) return -1;
        data += put, count -= (size_t)put;
    }
    return 0;
}

static void *pass_requests(void *argument) {
    struct conversation *c = argument;
    char *buffer = malloc(REQUEST_BYTES);
    ssize_t got;
    while (buffer && (got = recv(c->client, buffer, REQUEST_BYTES, 0)) > 0) {
        if (atomic_exchange(&c->server_spoke, false)) nanosleep(&delay, NULL);
        if (write_all(c->server, buffer, (size_t)got)) break;
    }
    free(buffer);
    shutdown(c->server, SHUT_WR);
    return NULL;
}

static void pass_answers(struct conversation *c) {
    int ends[2];
    ssize_t got;
    if (pipe2(ends, O_CLOEXEC)) return;
    fcntl(ends[1], F_SETPIPE_SZ, PIPE_BYTES); /* smaller by default: more system calls, nothing else */
    while ((got = splice(c->server, NULL, ends[1], NULL, PIPE_BYTES, SPLICE_F_MOVE)) > 0) {
        atomic_store(&c->server_spoke, true);
        while (got > 0) {
            ssize_t put = splice(ends[0], NULL, c->client, NULL, (size_t)got, SPLICE_F_MOVE);
            if (put <= 0) goto done;
            got -= put;
        }
    }
done:
    close(ends[0]), close(ends[1]);
}

static void *converse(void *argument) {
    struct conversation *c = argument;
    struct sockaddr_in target = {.sin_family = AF_INET, .sin_port = target_port, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1;
    c->server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(c->server, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(c->client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (c->server >= 0 && !connect(c->server, (struct sockaddr *)&target, sizeof target) &&
        !pthread_create(&c->requests, NULL, pass_requests, c)) {
        pass_answers(c);
        shutdown(c->client, SHUT_RDWR), shutdown(c->server, SHUT_RDWR);
        pthread_join(c->requests, NULL);
    }
    if (c->server >= 0) close(c->server);
    close(c->client);
    free(c);
    return NULL;
}

static void fail(const char *what) {
    fprintf(stderr, "delay_line: %s: %s\n", what, strerror(errno));
    exit(1);
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: delay_line LISTEN_PORT TARGET_PORT DELAY_US\n");
        return 2;
    }
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons((in_port_t)atoi(argv[1]))};
    long delay_us = atol(argv[3]);
    target_port = htons((in_port_t)atoi(argv[2]));
    delay = (struct timespec){.tv_sec = delay_us / 1000000, .tv_nsec = delay_us % 1000000 * 1000};
    signal(SIGPIPE, SIG_IGN);

    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    /* The same everywhere, whatever the machine's default is (BBR left more of a short link unused); accepted sockets
     * inherit it. */
    setsockopt(listener, IPPROTO_TCP, TCP_CONGESTION, "cubic", strlen("cubic"));
    if (listener < 0 || bind(listener, (struct sockaddr *)&here, sizeof here) || listen(listener, 512)) fail("listen");
    puts("ready"), fflush(stdout);

    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    for (;;) {
        pthread_t thread;
        struct conversation *c = calloc(1, sizeof *c);
        if (!c) fail("calloc");
        c->server_spoke = true; /* the first request is a turn, too */
        c->client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (c->client < 0 || pthread_create(&thread, &detached, converse, c)) {
            if (c->client >= 0) close(c->client);
            free(c);
        }
    }
}
